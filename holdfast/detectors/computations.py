"""What detectors find out about the models of a cohort. On a device it is computed for several experiments at
once, and the host is told one number for each model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from holdfast.aggregators.geometry import everywhere
from holdfast.core.columns import Columns, current, sharing
from holdfast.core.together import Computation


@dataclass(frozen=True)
class Sound(Computation):
    """Which models [n, d] are finite."""

    models: Tensor
    columns: Columns | None = field(default_factory=current)

    def alike(self) -> Hashable | None:
        if self.columns is not None:
            return None
        return Sound, tuple(self.models.shape), self.models.dtype, self.models.device

    def on_device(self) -> bool:
        return self.models.device.type != "cpu"

    def alone(self) -> Tensor:
        with sharing(self.columns):
            return everywhere(self._mine())

    def _mine(self) -> Tensor:
        if self.on_device() or not self.models.numel():
            return self.together([])[0]
        return self.models.amin(1).isfinite() & self.models.amax(1).isfinite()

    def together(self, others: Sequence[Sound]) -> list[Tensor]:
        several = [each.models for each in (self, *others)]
        if not self.models.numel():
            return [torch.ones(len(models), dtype=torch.bool) for models in several]
        ends = [torch.stack(torch.aminmax(models, dim=1)) for models in several]
        return list(torch.stack(ends).isfinite().all(1).cpu().unbind(0))
