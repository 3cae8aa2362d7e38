"""Which test samples an attack's success is measured on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.data.client_rows import ClientRows


class Triggered(NamedTuple):
    """Test samples that are shown with a trigger, labelled as its target."""

    table: ClientRows
    of_target: ClientRows | None
    """Those of them that show the target anyway, where the attack counts them too."""


def shown(test: ClientRows, target: int, inclusive: bool, among: Tensor | None = None) -> Triggered:
    """The test samples of other classes than the target, or of all where the attack counts these; `among`
    (one bool for each row of the store) leaves out others."""
    of_target = test.label == target
    kept = torch.ones_like(of_target) if inclusive else ~of_target
    if among is not None:
        kept &= among[test.row]
    return Triggered(
        _labelled(test, kept, target), _labelled(test, kept & of_target, target) if inclusive else None
    )


def _labelled(test: ClientRows, kept: Tensor, target: int) -> ClientRows:
    start = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])[test.start]
    return ClientRows(test.row[kept], torch.full_like(test.row[kept], target), start)
