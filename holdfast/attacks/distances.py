"""How far along a line from the mean an update may go unnoticed: what Min-Max and Min-Sum compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.aggregators import geometry
from holdfast.aggregators.geometry import deviation, only, over_columns
from holdfast.attacks.shared_rows import length
from holdfast.core.device import to_device

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
    mean = geometry.mean(updates)
    if kind == "std":
        direction = -deviation(updates)
    else:
        direction = -mean / length(mean).clamp(min=1e-30) if kind == "unit" else -mean.sign()
    n = len(updates)
    zero = torch.zeros(n + 1, n + 1, dtype=torch.float64, device=updates.device)

    def of(columns: slice) -> Tensor:
        found, (mine, middle, way) = zero.clone(), (only(x, columns) for x in (updates, mean, direction))
        for part in column_blocks(mine.shape[1], n):
            block = torch.cat([mine[:, part] - middle[part], way[None, part]]).double()
            found += block @ block.T
        return found

    gram = over_columns(zero, of).cpu()  # the search below asks for single numbers, and needs no other
    radius = gram.diagonal()[:n]
    pairs = (radius[:, None] + radius[None] - 2 * gram[:n, :n]).clamp(min=0)
    return Line(mean, direction, pairs, radius, gram[:n, n], gram[n, n])


class Lines(NamedTuple):
    """`Line` for c experiments: each tensor has a leading axis. What does not grow with the size of an update
    is on the host."""

    mean: Tensor
    direction: Tensor
    pairs: Tensor
    radius: Tensor
    lean: Tensor
    length: Tensor

    def squared(self, gammas: Tensor) -> Tensor:
        """[c, n]: from the point of each experiment."""
        gamma = gammas[:, None]
        return (self.radius - 2 * gamma * self.lean + gamma * gamma * self.length[:, None]).clamp(min=0)

    def points(self, gammas: Tensor) -> Tensor:
        """[c, d]: the points; the mean itself where the direction has no length."""
        factor = torch.where(self.length > 0, gammas, 0.0).to(self.mean.dtype)
        return self.mean + to_device(factor, self.mean.device)[:, None] * self.direction


def lines(updates: Tensor, kind: Perturbation) -> Lines:
    """`line` for the updates [c, n, d] of c experiments. The host waits for the device once."""
    c, n, d = updates.shape
    mean = updates.mean(1)
    if kind == "std":
        direction = -deviations(updates)
    elif kind == "unit":
        direction = -mean / mean.norm(dim=1, keepdim=True).clamp(min=1e-30)
    else:
        direction = -mean.sign()
    gram = torch.zeros(c, n + 1, n + 1, dtype=torch.float64, device=updates.device)
    for part in column_blocks(d, c * n):
        block = torch.cat([updates[..., part] - mean[:, None, part], direction[:, None, part]], 1).double()
        gram += block @ block.mT
    gram = gram.cpu()
    radius = gram.diagonal(dim1=1, dim2=2)[:, :n]
    pairs = (radius[:, :, None] + radius[:, None] - 2 * gram[:, :n, :n]).clamp(min=0)
    return Lines(mean, direction, pairs, radius, gram[:, :n, n], gram[:, n, n])


def deviations(x: Tensor) -> Tensor:
    """`deviation` for [c, n, d]: the standard deviation of each column in each of c experiments."""
    found = torch.empty_like(x[:, 0])
    for columns in column_blocks(x.shape[2], x.shape[0] * x.shape[1]):
        part = x[..., columns].double()
        part = part - part[:, :1]
        part -= part.mean(1, keepdim=True)
        found[:, columns] = (part.square_().sum(1) / (x.shape[1] - 1)).sqrt_()
    if x.dtype != torch.float64:  # float64 can square anything shorter
        return found
    fine = found.isfinite().all(1)
    return found if bool(fine.all()) else torch.where(fine[:, None], found, x.std(1))


def column_blocks(width: int, rows: int) -> Iterator[slice]:
    step = max(1, _BLOCK // rows)
    for start in range(0, width, step):
        yield slice(start, min(width, start + step))


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


def largest_of_each(fits: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """`largest` for several experiments, each of which tries the same values as it would alone."""
    low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    going = fits(high) & (high < 1e9)
    while bool(going.any()):
        low, high = torch.where(going, high, low), torch.where(going, 2 * high, high)
        going = going & fits(high) & (high < 1e9)
    while bool((going := (high - low > _TOLERANCE * high.clamp(max=1.0)) & (high > 1e-12)).any()):
        middle = (low + high) / 2
        fit = fits(middle)
        low, high = torch.where(going & fit, middle, low), torch.where(going & ~fit, middle, high)
    return low


def coarse_of_each(fits: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """`coarse` for several experiments."""
    best, gamma, step = (torch.full((count,), start, dtype=torch.float64) for start in (0.0, 2.0, 0.5))
    while bool((going := ((best - gamma).abs() > 0.02) & (gamma > 0) & (gamma < 1e3)).any()):
        fit = fits(gamma)
        further = torch.where(fit, gamma + step, gamma - step)
        best, gamma = torch.where(going & fit, gamma, best), torch.where(going, further, gamma)
        step = torch.where(going, (step / 2).clamp(min=0.05), step)
    return best
