"""The cosines of some updates with others, which a server half asks for; those of several experiments can be
computed together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.aggregators.geometry import cosines_between
from holdfast.core.together import Computation, stacked


@dataclass(frozen=True, eq=False)
class Cosines(Computation):
    """[n, m] on the host, of the rows of x [n, d] with those of y [m, d]."""

    x: Tensor
    y: Tensor

    def on_device(self) -> bool:
        return self.x.device.type != "cpu"

    def alike(self) -> Hashable | None:
        return Cosines, tuple(self.x.shape), tuple(self.y.shape), self.x.dtype, self.x.device

    def alone(self) -> Tensor:
        return cosines_between(self.x, self.y).cpu()

    def together(self, others: Sequence[Any]) -> list[Tensor] | None:
        of = [self, *others]
        found = cosines_between(stacked([one.x for one in of]), stacked([one.y for one in of]))
        return list(found.cpu().unbind())
