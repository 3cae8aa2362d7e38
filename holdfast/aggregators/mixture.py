"""Sums of models by weights, which a server half asks for; those of several experiments can be computed
together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.aggregators.geometry import product, weighted
from holdfast.core.device import to_device
from holdfast.core.together import Computation, stacked


@dataclass(frozen=True, eq=False)
class Mixture(Computation):
    """[n, d], where the models are: row i is the sum of the models [m, d] by row i of the weights [n, m],
    which may still be on the host. With weights [m], one such sum [d]."""

    weights: Tensor
    models: Tensor

    def on_device(self) -> bool:
        return self.models.device.type != "cpu"

    def alike(self) -> Hashable | None:
        weights, models = ((tuple(of.shape), of.dtype, of.device) for of in (self.weights, self.models))
        return Mixture, weights, models

    def alone(self) -> Tensor:
        return product(_like(self.weights, self.models), self.models)

    def together(self, others: Sequence[Any]) -> list[Tensor] | None:
        of = [self, *others]
        models = stacked([one.models for one in of])
        weights = _like(torch.stack([one.weights for one in of]), models)
        found = weighted(weights, models) if weights.ndim == 2 else product(weights, models)
        return list(found.unbind())


def _like(weights: Tensor, models: Tensor) -> Tensor:
    return to_device(weights, models.device).to(models.dtype)
