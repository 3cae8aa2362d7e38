"""How far along a line from the mean an update may go unnoticed: what Min-Max and Min-Sum compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.aggregators.geometry import deviation

Perturbation = Literal["std", "unit", "sign"]
_BLOCK = 1 << 24  # numbers in a block of columns
_TOLERANCE = 1e-5


class Line(NamedTuple):
    """Squared distances between clients and a point mean + gamma * direction, as far as they depend on gamma:
    one pass over the updates is enough, whatever gamma is tried."""

    mean: Tensor
    direction: Tensor
    pairs: Tensor
    """[n, n]: between the clients."""
    radius: Tensor
    """[n]: from the mean."""
    lean: Tensor
    """[n]: of (client - mean) along the direction."""
    length: Tensor
    """Of the direction, squared."""

    def squared(self, gamma: float) -> Tensor:
        """[n]: from the point."""
        return (self.radius - 2 * gamma * self.lean + gamma**2 * self.length).clamp(min=0)


def line(updates: Tensor, kind: Perturbation) -> Line:
    """From the mean of the updates, against them: coordinate by coordinate in proportion to their spread,
    along the mean, or by its signs."""
    mean = updates.mean(0)
    if kind == "std":
        direction = -deviation(updates)
    else:
        direction = -mean / mean.norm().clamp(min=1e-30) if kind == "unit" else -mean.sign()
    n = len(updates)
    gram = torch.zeros(n + 1, n + 1, dtype=torch.float64, device=updates.device)
    for columns in torch.arange(updates.shape[1]).split(max(1, _BLOCK // n)):
        part = slice(int(columns[0]), int(columns[-1]) + 1)
        block = torch.cat([updates[:, part] - mean[part], direction[None, part]]).double()
        gram += block @ block.T
    radius = gram.diagonal()[:n]
    pairs = (radius[:, None] + radius[None] - 2 * gram[:n, :n]).clamp(min=0)
    return Line(mean, direction, pairs, radius, gram[:n, n], gram[n, n])


def largest(fits: Callable[[float], bool]) -> float:
    """The largest gamma >= 0 that fits, by doubling and halving, to 1e-5 (of itself, where it is below 1). 0
    must fit."""
    low, high = 0.0, 1.0
    while fits(high) and high < 1e9:
        low, high = high, 2 * high
    while high - low > _TOLERANCE * min(1.0, high) and high > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def coarse(fits: Callable[[float], bool]) -> float:
    """The search of FedCAP's released code: from 2 on, in steps that are halved but stay at 0.05 or above."""
    best, gamma, step = 0.0, 2.0, 0.5
    while abs(best - gamma) > 0.02 and 0 < gamma < 1e3:
        if fits(gamma):
            best, gamma = gamma, gamma + step
        else:
            gamma -= step
        step = max(step / 2, 0.05)
    return best
