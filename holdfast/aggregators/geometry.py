"""Geometry of the rows of [n, d]: products, squared distances and cosines, all [n, n] in float64, from one
matrix product.

The product |a|^2 + |b|^2 - 2ab loses digits only where two rows are much closer to each other than to zero.
Updates of real rounds are not, so the plain product is the fast path; where it is too coarse for most pairs
(a large part in common), the rows are looked at a second time, in float64 and seen from their middle. A row
so long that its square overflows is infinitely far from all others, and affects only its own distances: no
distance depends on a third row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 1 << 19
"""Numbers in a block of columns: enough to keep a CPU busy, few enough for its caches."""
CUDA_BLOCK = 1 << 26
"""A GPU is kept busy by more, and each block has to be started: up to this many, but no more than a quarter
of a large input."""
_EXACT = 1e7  # rounding errors that a squared distance has to be larger than, to be good to seven digits
_TOO_CLOSE = 1e4  # closer than this many rounding errors of the products: fewer than four digits are left


def blocks(x: Tensor, times: int = 1) -> Iterator[slice]:
    """Slices of the columns of x, for work that would need a copy of everything at once, or one so many times
    as large."""
    numbers = max(2 * BLOCK, min(CUDA_BLOCK, x.numel() // 4)) if x.is_cuda else BLOCK
    step = max(1, numbers // max(1, len(x) * times))
    for start in range(0, x.shape[1], step):
        yield slice(start, min(x.shape[1], start + step))


def gram(x: Tensor) -> Tensor:
    """All products of rows; what overflows is infinite or NaN."""
    return _both_ways(_products(x, x))


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Never in the short formats that training may use on a GPU."""
    if not x.is_cuda:
        return (x @ y.T).double()
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return (x @ y.T).double()
    finally:
        torch.set_float32_matmul_precision(was)


def norms(x: Tensor, centre: Tensor | None = None) -> Tensor:
    """The length of each row, or its distance to a centre, in float64, so that a float32 row of 1e30 has
    one."""
    squares = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for columns in blocks(x):
        part = x[:, columns].to(torch.float64, copy=True)
        if centre is not None:
            part -= centre[columns]
        squares += part.square_().sum(dim=1)
    return squares.sqrt_()


def deviation(x: Tensor) -> Tensor:
    """The standard deviation of each column over two rows or more; `torch.std` goes down the columns one by
    one, which takes many times as long. It is left what even float64 cannot square."""
    found = torch.empty_like(x[0])
    for columns in blocks(x):
        part = x[:, columns].double()
        part = part - part[0]  # then equal rows are exactly 0, whatever the mean is rounded to
        part -= part.mean(0)
        found[columns] = (part.square_().sum(0) / (len(x) - 1)).sqrt_()
    return found if bool(found.isfinite().all()) else x.std(0)


def seen_from(x: Tensor, centre: Tensor) -> Tensor:
    """All products of the rows as they lie to a centre, in float64. The diagonal holds their squared
    distances to it."""
    found = torch.zeros(len(x), len(x), dtype=torch.float64, device=x.device)
    for columns in blocks(x):
        part = x[:, columns].to(torch.float64, copy=True)
        part -= centre[columns]
        found += part @ part.T
    return found


def to_mixture(seen: Tensor, weights: Tensor) -> Tensor | None:
    """The squared distance of each row to the sum of all by these weights, which add up to 1; `seen` is from
    anywhere. None where that is too near to some row for the digits that are left."""
    squares, cross, own = seen.diagonal(), seen @ weights, weights @ seen @ weights
    found = squares - 2 * cross + own
    size = seen.abs()
    doubt = (squares + 2 * (size @ weights) + weights @ size @ weights) * (
        len(seen) * torch.finfo(torch.float64).eps
    )
    return found if bool((found > _EXACT * doubt).all()) else None


def distances(x: Tensor) -> Tensor:
    """Squared distances between the rows; zero on the diagonal, infinite where a row overflows."""
    products = gram(x)
    squares = products.diagonal()
    both = squares[:, None] + squares[None, :]
    found = both - 2 * products
    limit = _TOO_CLOSE * torch.finfo(x.dtype).eps
    if len(x) > 1 and bool((found < limit * both).sum() - len(x) > len(x) * (len(x) - 1) // 2):
        products = _from_the_middle(x, squares)
        squares = products.diagonal()
        found = squares[:, None] + squares[None, :] - 2 * products
    found = found.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=torch.inf).clamp_(min=0)
    return found.fill_diagonal_(0)


def cosines(x: Tensor) -> Tensor:
    """Cosines between the rows; a row of zeros is at a right angle to every other."""
    products = gram(x)
    if bool(products.diagonal().isinf().any()):  # a row too long to be squared still has a direction
        x = x.clamp(
            min=torch.finfo(x.dtype).min, max=torch.finfo(x.dtype).max
        )  # a sum over rounds may have run to infinity
        products = gram(x / x.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny))
    lengths = products.diagonal().sqrt()
    found = products / (lengths[:, None] * lengths[None, :])
    return found.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(-1, 1).fill_diagonal_(1)


def cosines_between(x: Tensor, y: Tensor) -> Tensor:
    """Cosines of the rows of x with those of y; a row of zeros is at a right angle to all. Rows are scaled
    first: nothing overflows."""
    return _products(_unit(x), _unit(y)).clamp_(-1, 1)


def _unit(x: Tensor) -> Tensor:
    if not len(x):
        return x
    tiny = torch.finfo(x.dtype).tiny
    scaled = x / torch.maximum(x.amax(dim=1), -x.amin(dim=1)).clamp_(min=tiny)[:, None]
    return scaled.div_(norms(scaled).clamp_(min=tiny).to(x.dtype)[:, None])


def _from_the_middle(x: Tensor, squares: Tensor) -> Tensor:
    """The products in float64 after the mean of the shorter half of the rows is taken off; a few long rows do
    not move that mean."""
    shorter = squares <= squares.nan_to_num(nan=torch.inf).median()
    weights = shorter.to(x.dtype) / shorter.sum()
    found = torch.zeros(len(x), len(x), dtype=torch.float64, device=x.device)
    for columns in blocks(x):
        part = x[:, columns]
        seen = part.double() - torch.where(shorter[:, None], part, 0).T.mv(weights).double()
        found += seen @ seen.T
    return _both_ways(found)


def _both_ways(products: Tensor) -> Tensor:
    """Make it symmetric: a library may round ab and ba differently, and which rows are nearest must not
    depend on it."""
    return (products + products.T) / 2
