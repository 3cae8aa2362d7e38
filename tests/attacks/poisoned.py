"""A small federation by hand, and what an attack makes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.attacks import Adversary
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.data.federation import ClientRows, Federation, Samples


def federation(x: Tensor | None = None, per_client: int = 20, classes: int = 10) -> Federation:
    """Three clients with 20 training samples each; a test table of 6, 3 and 0 samples."""
    rows = 3 * per_client + 9
    x = Key(0).hash(rows, 1, 4, 4).remainder(256).to(torch.uint8) if x is None else x
    y = torch.arange(rows) % classes
    table = ClientRows(torch.arange(3 * per_client), y[: 3 * per_client], torch.arange(4) * per_client)
    test = ClientRows(torch.arange(3 * per_client, rows), y[3 * per_client :], torch.tensor([0, 6, 9, 9]))
    empty = ClientRows(table.row[:0], table.label[:0], torch.zeros(4, dtype=torch.int64))
    return Federation(
        Samples(x, y, classes, rows, name="made up"), table, empty, test, empty, empty, "digest"
    )


def poisoned(before: Federation, **settings: Any) -> tuple[Adversary, Federation]:
    adversary = Adversary(build("attack", settings), torch.arange(3), Key(0))
    return adversary, adversary.poison_data(before)
