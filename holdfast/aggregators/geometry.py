"""Geometry of the rows of [n, d]: products, squared distances and cosines, all [n, n] in float64, from one
matrix product. Everything here takes further axes before these two, such as one for the experiments of a
sweep. Where several processes share the rows, each with some of the columns (core/columns.py), each calls
these functions with its own columns, and what they find out is about all of them.

The product |a|^2 + |b|^2 - 2ab loses digits only where two rows are much closer to each other than to zero.
Updates of real rounds are not, so the plain product is the fast path; where it is too coarse for most pairs
(a large part in common), the rows are looked at a second time, in float64 and seen from their middle. A row
so long that its square overflows is infinitely far from all others, and affects only its own distances: no
distance depends on a third row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from holdfast.core.columns import current, sharing
from holdfast.core.device import to_device

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
    far = x.device.type != "cpu"
    numbers = max(2 * BLOCK, min(CUDA_BLOCK, x.numel() // 4)) if far else BLOCK
    step = max(1, numbers // max(1, x.shape[:-1].numel() * times))
    for start in range(0, x.shape[-1], step):
        yield slice(start, min(x.shape[-1], start + step))


def over_columns(zero: Tensor, found: Callable[[slice], Tensor]) -> Tensor:
    """What `found` gives for the columns of a slice, over all columns: a sum of what the pieces give, where
    several processes share the rows. `zero` has its shape."""
    shared = current()
    if shared is None:
        return found(slice(None))
    with sharing(None):  # a piece is looked at by itself
        parts = [found(piece) for piece in shared.pieces()]
    return shared.add_up(zero, parts)


def total(mine: Tensor) -> Tensor:
    """The sum of what all processes have counted in their columns."""
    shared = current()
    return mine if shared is None else torch.stack(shared.ranks.gather(mine)).sum(dim=0)


def everywhere(mine: Tensor) -> Tensor:
    """bool: what is true of the columns of all processes."""
    shared = current()
    return mine if shared is None else torch.stack(shared.ranks.gather(mine)).all(dim=0)


def largest_of_all(mine: Tensor) -> Tensor:
    """The largest of what all processes have found in their columns."""
    shared = current()
    return mine if shared is None else torch.stack(shared.ranks.gather(mine)).amax(dim=0)


def by_pieces(x: Tensor, found: Callable[[Tensor], Tensor]) -> Tensor:
    """`found` of the columns of x, which gives a column for each. Where several processes share the rows,
    piece by piece: libraries may round products of wide and of narrow matrices differently."""
    shared = current()
    if shared is None:
        return found(x)
    with sharing(None):
        parts = [found(only(x, piece)) for piece in shared.pieces()]
        return torch.cat(parts, dim=-1) if parts else found(x)


def only(x: Tensor, columns: slice) -> Tensor:
    """These columns of x: x itself, or a piece in a memory of its own, since libraries may round differently
    where rows lie farther apart or begin elsewhere."""
    return x if columns == slice(None) else x[..., columns].clone(memory_format=torch.contiguous_format)


@contextmanager
def full_precision(x: Tensor) -> Iterator[None]:
    """Products in here are never in the short formats that training may use on a GPU."""
    if x.device.type == "cpu":
        yield
        return
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(was)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of matrices, in full precision."""
    with full_precision(b):
        return a @ b


def mix(mixing: Tensor, x: Tensor) -> Tensor:
    """Mixtures of the rows of x: mixing @ x, in full precision."""
    return by_pieces(x, lambda part: product(mixing, part))


def weighted(w: Tensor, x: Tensor) -> Tensor:
    """The sum of the rows of x by the weights w [..., n], which may still be on the host; in full
    precision."""
    return mix(to_device(w, x.device)[..., None, :], x)[..., 0, :]


def combined(w: Tensor, table: Tensor) -> Tensor:
    """The same for a small table, such as one of all pairs of clients, which every process has whole."""
    return product(to_device(w, table.device)[..., None, :], table)[..., 0, :]


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrices times vectors."""
    return matrix @ vector if matrix.ndim == 2 else product(matrix, vector[..., None])[..., 0]


def gram(x: Tensor) -> Tensor:
    """All products of rows; what overflows is infinite or NaN."""

    def of(columns: slice) -> Tensor:
        part = only(x, columns)
        return product(part, part.mT).double()

    return _both_ways(over_columns(_zeros(x), of))


def norms(x: Tensor, centre: Tensor | None = None) -> Tensor:
    """The length of each row, or its distance to a centre, in float64, so that a float32 row of 1e30 has
    one."""
    zero = torch.zeros(x.shape[:-1], dtype=torch.float64, device=x.device)

    def of(columns: slice) -> Tensor:
        mine, at = only(x, columns), None if centre is None else only(centre, columns)
        squares = torch.zeros_like(zero)
        for block in blocks(mine):
            part = mine[..., block].to(torch.float64, copy=True)
            if at is not None:
                part -= at[..., None, block]
            squares += part.square_().sum(dim=-1)
        return squares

    return over_columns(zero, of).sqrt_()


def along(x: Tensor, direction: Tensor) -> Tensor:
    """[..., n]: the product of each row with a vector [..., d], in float64."""

    def of(columns: slice) -> Tensor:
        mine, its = only(x, columns), only(direction, columns)
        found = torch.zeros(x.shape[:-1], dtype=torch.float64, device=x.device)
        for block in blocks(mine):
            found += times(mine[..., block].double(), its[..., block].double())
        return found

    return over_columns(torch.zeros(x.shape[:-1], dtype=torch.float64, device=x.device), of)


def mean(x: Tensor) -> Tensor:
    """The mean of each column."""
    return by_pieces(x, lambda part: part.mean(-2))


def deviation(x: Tensor) -> Tensor:
    """The standard deviation of each column over two rows or more; `torch.std` goes down the columns one by
    one, which takes many times as long. It is left what even float64 cannot square."""
    found = by_pieces(x, _deviation)
    finite = everywhere(found.isfinite().all(dim=-1, keepdim=True))
    return (
        found if bool(finite.all()) else torch.where(finite, found, by_pieces(x, lambda part: part.std(-2)))
    )


def _deviation(x: Tensor) -> Tensor:
    found = torch.empty_like(x[..., 0, :])
    for columns in blocks(x):
        part = x[..., columns].double()
        part = part - part[..., :1, :]  # then equal rows are exactly 0, whatever the mean is rounded to
        part -= part.mean(-2, keepdim=True)
        found[..., columns] = (part.square_().sum(-2) / (x.shape[-2] - 1)).sqrt_()
    return found


def seen_from(x: Tensor, centre: Tensor) -> Tensor:
    """All products of the rows as they lie to a centre, in float64. The diagonal holds their squared
    distances to it."""

    def of(columns: slice) -> Tensor:
        mine, at = only(x, columns), only(centre, columns)
        found = _zeros(x)
        for block in blocks(mine):
            part = mine[..., block].to(torch.float64, copy=True)
            part -= at[..., None, block]
            found += part @ part.mT
        return found

    return over_columns(_zeros(x), of)


def to_mixture(seen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The squared distance of each row to the sum of all by these weights, which add up to 1; `seen` is from
    anywhere. And whether it can be used: where that is too near to some row, too few digits are left."""
    squares, size = diagonal(seen), seen.abs()
    cross, own = times(seen, weights), _dot(combined(weights, seen), weights)[..., None]
    found = squares - 2 * cross + own
    doubt = (squares + 2 * times(size, weights) + _dot(combined(weights, size), weights)[..., None]) * (
        seen.shape[-1] * torch.finfo(torch.float64).eps
    )
    return found, (found > _EXACT * doubt).all(dim=-1)


def distances(x: Tensor) -> Tensor:
    """Squared distances between the rows; zero on the diagonal, infinite where a row overflows."""
    n, products = x.shape[-2], gram(x)
    found, both = _apart(products)
    limit = _TOO_CLOSE * torch.finfo(x.dtype).eps
    if n > 1:
        coarse = (found < limit * both).sum((-2, -1)) - n > n * (n - 1) // 2
        if bool(coarse.any()):
            again, _ = _apart(_from_the_middle(x, diagonal(products)))
            found = torch.where(coarse[..., None, None], again, found)
    found = found.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=torch.inf).clamp_(min=0)
    diagonal(found).fill_(0)
    return found


def cosines(x: Tensor) -> Tensor:
    """Cosines between the rows; a row of zeros is at a right angle to every other."""
    products = gram(x)
    long = diagonal(products).isinf().any(dim=-1)
    if bool(long.any()):  # a row too long to be squared still has a direction
        count = products.shape[:-2].numel()
        each, apart = x.reshape(count, *x.shape[-2:]), products.view(count, *products.shape[-2:])
        for place in long.flatten().nonzero().flatten().tolist():
            apart[place] = gram(_scaled(each[place]))
    lengths = diagonal(products).sqrt()
    found = products / (lengths[..., :, None] * lengths[..., None, :])
    found = found.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(-1, 1)
    diagonal(found).fill_(1)
    return found


def _scaled(x: Tensor) -> Tensor:
    """Rows with a largest entry of 1. A sum over rounds may have run to infinity."""
    x = x.clamp(min=torch.finfo(x.dtype).min, max=torch.finfo(x.dtype).max)
    return x / _largest(x)


def cosines_between(x: Tensor, y: Tensor) -> Tensor:
    """Cosines of the rows of x with those of y; a row of zeros is at a right angle to all. Rows are scaled
    first: nothing overflows."""
    left, right = _unit(x), _unit(y)
    zero = torch.zeros(*x.shape[:-1], y.shape[-2], dtype=torch.float64, device=x.device)
    found = over_columns(zero, lambda part: product(only(left, part), only(right, part).mT).double())
    return found.clamp_(-1, 1)


def _unit(x: Tensor) -> Tensor:
    if not x.shape[:-1].numel():
        return x
    scaled = x / _largest(x)
    return scaled.div_(norms(scaled).clamp_(min=torch.finfo(x.dtype).tiny).to(x.dtype)[..., None])


def _largest(x: Tensor) -> Tensor:
    """[..., n, 1]: the largest entry of each row without its sign, but never 0."""
    most = x.new_zeros(*x.shape[:-1], 1)
    if x.shape[-1]:
        most = torch.maximum(x.amax(dim=-1, keepdim=True), -x.amin(dim=-1, keepdim=True))
    return largest_of_all(most).clamp_(min=torch.finfo(x.dtype).tiny)


def diagonal(matrix: Tensor) -> Tensor:
    """A view of the diagonals."""
    return matrix.diagonal(dim1=-2, dim2=-1)


def _apart(products: Tensor) -> tuple[Tensor, Tensor]:
    """The squared distances, and the sums of squared lengths that they are differences of."""
    squares = diagonal(products)
    both = squares[..., :, None] + squares[..., None, :]
    return both - 2 * products, both


def _from_the_middle(x: Tensor, squares: Tensor) -> Tensor:
    """The products in float64 after the mean of the shorter half of the rows is taken off; a few long rows do
    not move that mean."""
    half = (x.shape[-2] - 1) // 2
    shorter = squares <= squares.nan_to_num(nan=torch.inf).sort(dim=-1).values[..., half : half + 1]
    weights = shorter.to(x.dtype) / shorter.sum(dim=-1, keepdim=True)

    def of(columns: slice) -> Tensor:
        mine, found = only(x, columns), _zeros(x)
        for block in blocks(mine):
            part = mine[..., block]
            middle = weighted(weights, torch.where(shorter[..., None], part, 0))
            seen = part.double() - middle.double()[..., None, :]
            found += seen @ seen.mT
        return found

    return _both_ways(over_columns(_zeros(x), of))


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(*x.shape[:-1], x.shape[-2], dtype=torch.float64, device=x.device)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return a @ b if a.ndim == 1 else (a * b).sum(dim=-1)


def _both_ways(products: Tensor) -> Tensor:
    """Make it symmetric: a library may round ab and ba differently, and which rows are nearest must not
    depend on it."""
    return (products + products.mT) / 2
