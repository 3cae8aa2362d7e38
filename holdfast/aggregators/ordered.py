"""The values of each coordinate in ascending order, block of columns by block, and the median, on which every
rule falls back. Everything here takes further axes before [n, d], such as one for the experiments of a
sweep."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.aggregators.geometry import blocks, total
from holdfast.core.device import to_device

_FEW = 32
"""Up to so many values PyTorch sorts on a GPU with a kernel for short rows, but only if equal ones may come
in any order."""


def by_id(ids: Tensor, x: Tensor) -> Tensor:
    """The rows of x in the order of their ids, so that a tie goes to the lowest id, not to the first
    reply."""
    return to_device(ids.argsort(dim=-1), x.device)


def arranged(matrix: Tensor, order: Tensor) -> Tensor:
    """The rows and the columns of square matrices in this order."""
    rows = matrix.gather(-2, order[..., :, None].expand(matrix.shape))
    return rows.gather(-1, order[..., None, :].expand(matrix.shape))


def columns_in_order(x: Tensor, order: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """For a block of coordinates: their values [coordinates, n] ascending, and the clients they come from as
    places in `order`; equal values in that order. A caller that keeps nothing of them holds one block at a
    time."""
    far = x.device.type != "cpu"
    if x.ndim == 2 and not far:
        return sort(x[:, columns][order].T.contiguous(), quick=False)
    part = x[..., columns].mT
    part = part.gather(-1, order[..., None, :].expand(*part.shape[:-1], order.shape[-1]))
    return sort(part, quick=far and order.shape[-1] <= _FEW)


def sort(values: Tensor, quick: bool) -> tuple[Tensor, Tensor]:
    """Each row ascending, equal values in the order they had, and where they were. Quick: any order, unless
    there are equal values."""
    if quick:
        found, places = values.sort(dim=-1)
        if not bool((found[..., 1:] == found[..., :-1]).any()):
            return found, places
    found, places = values.sort(dim=-1, stable=True)
    return found, places


def tally(places: Tensor, n: int) -> Tensor:
    """How often each of n places [..., n] occurs in [..., coordinates, few], where none occurs twice at one
    coordinate. On a device without a wait for the host."""
    if places.ndim == 2 and places.device.type == "cpu":
        return places.flatten().bincount(minlength=n)
    there = torch.zeros(*places.shape[:-1], n, dtype=torch.bool, device=places.device)
    return there.scatter_(-1, places, True).sum(dim=-2)


def spread(counts: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """Counts by place in `order` as each row's share of all."""
    shares = (counts.double() / counts.sum(dim=-1, keepdim=True)).to(dtype)
    return torch.empty_like(shares).scatter_(-1, order, shares)


def median(x: Tensor, ids: Tensor, lower: bool = False) -> tuple[Tensor, Tensor]:
    """The coordinate-wise median and the share of coordinates at which each row was the middle one (one of
    the two, where n is even)."""
    n, order = x.shape[-2], by_id(ids, x)
    middle = slice((n - 1) // 2, (n - 1) // 2 + 1 if lower else n // 2 + 1)
    value, counts = torch.empty_like(x[..., 0, :]), torch.zeros_like(order)
    for columns in blocks(x):
        value[..., columns], found = _middle(*columns_in_order(x, order, columns), middle)
        counts += found
    return value, spread(total(counts), order, x.dtype)


def _middle(values: Tensor, places: Tensor, middle: slice) -> tuple[Tensor, Tensor]:
    return values[..., middle].mean(dim=-1), tally(places[..., middle], values.shape[-1])


def around_the_median(values: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The means of so many values nearest to the median, and at how many coordinates each client's value was
    in them. In ascending order these lie side by side: their window moves up as long as the value it leaves
    is farther off than the one it takes in. Of equal values at its lower end it has those of the highest ids,
    which makes a difference to the weights only."""
    d, m = values.shape[-2:]
    middle = values[..., (m - 1) // 2 : m // 2 + 1].mean(dim=-1, keepdim=True)
    up = middle - values[..., : m - count] > values[..., count:] - middle
    start = up.sum(dim=-1, keepdim=True)
    value = values.gather(-1, start + torch.arange(count, device=values.device)).mean(dim=-1)
    outside = torch.arange(m - count, device=values.device)  # fewer to count than those in it
    outside = torch.where(outside < start, outside, outside + count)
    return value, d - tally(places.gather(-1, outside), m)


def lowest(scores: Tensor, m: int, ids: Tensor) -> Tensor:
    """The rows of the m lowest scores; of equal scores the lower id comes first."""
    order = by_id(ids, scores)
    return order.gather(-1, scores.gather(-1, order).argsort(dim=-1, stable=True)[..., :m])


def equal_weights(rows: Tensor, x: Tensor) -> Tensor:
    """[n]: the chosen rows share everything, the others have nothing."""
    return x.new_zeros(x.shape[:-1]).scatter_(-1, rows, 1 / rows.shape[-1])
