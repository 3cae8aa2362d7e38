"""The values of each coordinate in ascending order, block of columns by block, and the median, on which every
rule falls back."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.aggregators.geometry import blocks

_FEW = 32
"""Up to so many values PyTorch sorts on a GPU with a kernel for short rows, but only if equal ones may come
in any order."""


def by_id(ids: Tensor, x: Tensor) -> Tensor:
    """The rows of x in the order of their ids, so that a tie goes to the lowest id, not to the first
    reply."""
    return ids.to(x.device).argsort()


def columns_in_order(x: Tensor, order: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """For a block of coordinates: their values [coordinates, n] ascending, and the clients they come from as
    places in `order`; equal values in that order. A caller that keeps nothing of them holds one block at a
    time."""
    part = x[:, columns].T.index_select(1, order) if x.is_cuda else x[:, columns][order].T.contiguous()
    return sort(part, quick=x.is_cuda and len(order) <= _FEW)


def sort(values: Tensor, quick: bool) -> tuple[Tensor, Tensor]:
    """Each row ascending, equal values in the order they had, and where they were. Quick: any order, unless
    there are equal values."""
    if quick:
        found, places = values.sort(dim=1)
        if not bool((found[:, 1:] == found[:, :-1]).any()):
            return found, places
    found, places = values.sort(dim=1, stable=True)
    return found, places


def spread(counts: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """Counts by place in `order` as each row's share of all."""
    return torch.empty_like(counts, dtype=dtype).index_copy_(
        0, order, (counts.double() / counts.sum()).to(dtype)
    )


def median(x: Tensor, ids: Tensor, lower: bool = False) -> tuple[Tensor, Tensor]:
    """The coordinate-wise median and the share of coordinates at which each row was the middle one (one of
    the two, where n is even)."""
    n, order = len(x), by_id(ids, x)
    middle = slice((n - 1) // 2, (n - 1) // 2 + 1 if lower else n // 2 + 1)
    value, counts = torch.empty_like(x[0]), torch.zeros(n, dtype=torch.int64, device=x.device)
    for columns in blocks(x):
        value[columns], found = _middle(*columns_in_order(x, order, columns), middle)
        counts += found
    return value, spread(counts, order, x.dtype)


def _middle(values: Tensor, places: Tensor, middle: slice) -> tuple[Tensor, Tensor]:
    return values[:, middle].mean(dim=1), places[:, middle].flatten().bincount(minlength=values.shape[1])


def lowest(scores: Tensor, m: int, ids: Tensor) -> Tensor:
    """The rows of the m lowest scores; of equal scores the lower id comes first."""
    order = by_id(ids, scores)
    return order[scores[order].argsort(stable=True)[:m]]


def equal_weights(rows: Tensor, x: Tensor) -> Tensor:
    """[n]: the chosen rows share everything, the others have nothing."""
    return torch.zeros_like(x[:, 0]).index_fill_(0, rows, 1 / len(rows))
