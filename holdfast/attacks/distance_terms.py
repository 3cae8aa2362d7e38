"""What keeps the model of an attacker near another one while it trains: a term of its loss, or a
projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.core.flat import Layout
from holdfast.local.losses import Batch, Loss

_AIM = "aim/"


def aims(layout: Layout, models: Tensor) -> dict[str, Tensor]:
    """The parameters of models [n, size] as `aux` for `away`."""
    views = layout.unflatten(models)
    return {f"{_AIM}{slot.name}": views[slot.name] for slot in layout.slots if not slot.buffer}


def away(net: Any, batch: Batch) -> Tensor:
    """||w - aim||_2 over all parameters. Its gradient at w = aim, where it has none, is taken as 0."""
    lengths = [
        torch.linalg.vector_norm(value - batch.aux[f"{_AIM}{name}"])
        for name, value in net.named_parameters()
        if f"{_AIM}{name}" in batch.aux
    ]
    return torch.linalg.vector_norm(torch.stack(lengths))


def drawn(net: Any, batch: Batch, *, loss: Loss, near: float, share: float = 1.0) -> Tensor:
    """share * loss + near * ||w - aim||_2."""
    return share * loss(net, batch) + near * away(net, batch)


def within(models: Tensor, centres: Tensor, radius: float | None) -> Tensor:
    """Models [n, k], projected onto the balls of this radius around the centres."""
    if radius is None:
        return models
    moved = models - centres
    length = moved.double().norm(dim=1, keepdim=True).clamp(min=1e-300)
    return centres + moved * (radius / length).clamp(max=1).to(moved)
