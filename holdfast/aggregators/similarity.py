"""Lengths of updates and their cosines, which a server half asks for; those of several experiments can be
computed together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from holdfast.aggregators.geometry import cosines_between, norms
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


@dataclass(frozen=True, eq=False)
class Lengths(Computation):
    """[n] in float64 on the host, of the rows of x [n, d]."""

    x: Tensor

    def on_device(self) -> bool:
        return self.x.device.type != "cpu"

    def alike(self) -> Hashable | None:
        return Lengths, tuple(self.x.shape), self.x.dtype, self.x.device

    def alone(self) -> Tensor:
        return norms(self.x).cpu()

    def together(self, others: Sequence[Any]) -> list[Tensor] | None:
        return list(norms(stacked([one.x for one in (self, *others)])).cpu().unbind())
