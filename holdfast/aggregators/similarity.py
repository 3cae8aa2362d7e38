"""Lengths of updates, their cosines and their distances, which a server half asks for; those of several
experiments can be computed together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holdfast.aggregators.geometry import cosines_between, distances, norms
from holdfast.core.columns import Columns, current, sharing
from holdfast.core.together import Computation, stacked


@dataclass(frozen=True, eq=False)
class Cosines(Computation):
    """[n, m] on the host, of the rows of x [n, d] with those of y [m, d]."""

    x: Tensor
    y: Tensor
    columns: Columns | None = field(default_factory=current)

    def on_device(self) -> bool:
        return self.x.device.type != "cpu"

    def alike(self) -> Hashable | None:
        if self.columns is not None:
            return None
        return Cosines, tuple(self.x.shape), tuple(self.y.shape), self.x.dtype, self.x.device

    def alone(self) -> Tensor:
        with sharing(self.columns):
            return cosines_between(self.x, self.y).cpu()

    def together(self, others: Sequence[Any]) -> list[Tensor] | None:
        of = [self, *others]
        found = cosines_between(stacked([one.x for one in of]), stacked([one.y for one in of]))
        return list(found.cpu().unbind())


@dataclass(frozen=True, eq=False)
class Distances(Computation):
    """[n, n] in float64 on the host: the squared distances between the rows of x [n, d]."""

    x: Tensor

    def on_device(self) -> bool:
        return self.x.device.type != "cpu"

    def alike(self) -> Hashable | None:
        return Distances, tuple(self.x.shape), self.x.dtype, self.x.device

    def alone(self) -> Tensor:
        return distances(self.x).cpu()

    def together(self, others: Sequence[Any]) -> list[Tensor] | None:
        return list(distances(stacked([one.x for one in (self, *others)])).cpu().unbind())


@dataclass(frozen=True, eq=False)
class Lengths(Computation):
    """[n] in float64 on the host, of the rows of x [n, d], or how far they are from a centre [d]."""

    x: Tensor
    centre: Tensor | None = None
    columns: Columns | None = field(default_factory=current)

    def on_device(self) -> bool:
        return self.x.device.type != "cpu"

    def alike(self) -> Hashable | None:
        if self.columns is not None:
            return None
        return Lengths, tuple(self.x.shape), self.x.dtype, self.x.device, self.centre is None

    def alone(self) -> Tensor:
        with sharing(self.columns):
            return norms(self.x, self.centre).cpu()

    def together(self, others: Sequence[Any]) -> list[Tensor] | None:
        of = [self, *others]
        centres = [one.centre for one in of if one.centre is not None]
        found = norms(stacked([one.x for one in of]), torch.stack(centres) if centres else None)
        return list(found.cpu().unbind())
