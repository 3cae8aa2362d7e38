"""What detectors find out about the models of a cohort. On a device it is computed for several experiments at
once, and the host is told one number for each model."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.aggregators.geometry import norms
from holdfast.core.together import Computation

_LIMIT = 1 << 26  # numbers in float64 at a time


@dataclass(frozen=True)
class Lengths:
    """How far each model [n, d] is from the reference [d]."""

    models: Tensor
    reference: Tensor

    def alike(self) -> Hashable | None:
        models = self.models
        return tuple(models.shape), models.dtype, self.reference.dtype, models.device

    def on_device(self) -> bool:
        return self.models.device.type != "cpu"

    def alone(self) -> Tensor:
        return norms(self.models, self.reference).cpu()

    def together(self, others: Sequence[Lengths]) -> list[Tensor]:
        several = [self, *others]
        n, d = self.models.shape
        squares = torch.zeros(len(several), n, dtype=torch.float64, device=self.models.device)
        centres = torch.stack([each.reference for each in several])[:, None]
        step = max(1, _LIMIT // max(1, squares.numel()))
        for start in range(0, d, step):
            columns = slice(start, start + step)
            part = torch.stack([each.models[:, columns] for each in several]).double()
            squares += (part - centres[..., columns]).square_().sum(2)
        return list(squares.sqrt_().cpu().unbind(0))


@dataclass(frozen=True)
class Sound:
    """Which models [n, d] are finite."""

    models: Tensor

    def alike(self) -> Hashable | None:
        return tuple(self.models.shape), self.models.dtype, self.models.device

    def on_device(self) -> bool:
        return self.models.device.type != "cpu"

    def alone(self) -> Tensor:
        return torch.isfinite(self.models).all(1) if not self.on_device() else self.together([])[0]

    def together(self, others: Sequence[Sound]) -> list[Tensor]:
        several = [each.models for each in (self, *others)]
        if not self.models.numel():
            return [torch.ones(len(models), dtype=torch.bool) for models in several]
        ends = [torch.stack(torch.aminmax(models, dim=1)) for models in several]
        return list(torch.stack(ends).isfinite().all(1).cpu().unbind(0))


def found(computation: Computation) -> Generator[Any, Any, Any]:
    """The answer to a computation. Only one on a device is passed on, so that who runs detectors on a CPU, as
    the server of a federation does, is asked for exchanges alone."""
    return (yield computation) if computation.on_device() else computation.alone()
