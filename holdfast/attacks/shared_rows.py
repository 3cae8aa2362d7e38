"""Numbers about whole rows where this process may have some of the columns only (core/columns.py), beside
those of `aggregators/geometry.py`. Where nothing is shared, they are what PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.aggregators.geometry import norms, only, over_columns
from holdfast.core.columns import current
from holdfast.core.keys import Key


def normal(key: Key, *shape: int, dtype: torch.dtype) -> Tensor:
    return _drawn(Key.normal, key, shape, dtype)


def uniform(key: Key, *shape: int, dtype: torch.dtype) -> Tensor:
    return _drawn(Key.uniform, key, shape, dtype)


def _drawn(draw: Callable[..., Tensor], key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random rows [..., *shape]. Where several processes share them, each draws whole rows, one at a time,
    and keeps its columns: the numbers do not depend on who draws."""
    shared = current()
    if shared is None:
        return draw(key, *shape, dtype=dtype)
    wide = (*shape[:-1], shared.total)
    rows = [shared.mine(draw(Key(bits), *wide, dtype=dtype)) for bits in key.bits.view(-1)]
    return torch.stack(rows).view(*key.bits.shape, *rows[0].shape)


def length(x: Tensor) -> Tensor:
    """Of a vector."""
    return x.norm() if current() is None else norms(x[None])[0].to(x.dtype)


def inner(x: Tensor, y: Tensor) -> Tensor:
    """The product of two vectors."""
    return over_columns(x.new_zeros(()), lambda part: only(x, part) @ only(y, part))


def spread(x: Tensor) -> Tensor:
    """[..., 1]: the standard deviation of the numbers of each row."""
    shared = current()
    if shared is None:
        return torch.std(x, dim=-1, keepdim=True)
    zero = x.new_zeros(x.shape[:-1])
    middle = over_columns(zero, lambda part: only(x, part).sum(dim=-1))[..., None] / shared.total
    squares = over_columns(zero, lambda part: (only(x, part) - middle).square_().sum(dim=-1))
    return (squares[..., None] / (shared.total - 1)).sqrt_()


def lengths(x: Tensor) -> Tensor:
    """[..., 1]: of each row."""
    return x.norm(dim=-1, keepdim=True) if current() is None else norms(x)[..., None].to(x.dtype)


def root_mean_square(x: Tensor) -> Tensor:
    """[..., 1]: of the numbers of each row."""
    shared = current()
    return lengths(x) / max(1, x.shape[-1] if shared is None else shared.total) ** 0.5
