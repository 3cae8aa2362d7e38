"""Numbers of a stack of rows, and arithmetic with them on lists of [m, ...] tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.core.device import to_device

PerRow = float | Tensor
"""A number for all rows, or a tensor with one number per row; a tensor without an axis is one number in the
memory of a device."""


def is_zero(value: PerRow) -> bool:
    return not isinstance(value, Tensor) and value == 0.0


def plus(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_add(a, b))


def times(tensors: list[Tensor], value: PerRow) -> list[Tensor]:
    """Multiply every row by its own number."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return list(torch._foreach_mul(tensors, value.to(tensors[0].dtype)))
    if isinstance(value, Tensor):
        return [t * value.to(t.dtype).view(-1, *[1] * (t.ndim - 1)) for t in tensors]
    return list(torch._foreach_mul(tensors, value))


def row_norms(tensors: list[Tensor], alone: bool) -> Tensor:
    """Return the Euclidean norm of all tensors of a row together: [m], or one number where the tensors belong
    to one row and have no leading axis."""
    squares = [t.square().sum() if alone else t.square().flatten(1).sum(1) for t in tensors]
    return torch.stack(squares).sum(0).sqrt()


def arranged(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a stack in the memory order of another, because adding stacks of different orders is slow. The
    gradients of stacked linear layers are transposed; in those of convolutions, the input channels are
    innermost."""
    if tensor.stride() == like.stride() or not len(like) or like.stride(0) != like[0].numel():
        return tensor
    return torch.empty_strided(tensor.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor
    )


def laid_out_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the strides of another of its shape, also along axes of length 1: lists of tensors
    are added in one operation only if those agree."""
    if tensor.stride() == like.stride():
        return tensor
    wide = [place for place, length in enumerate(like.shape) if length > 1]
    if all(tensor.stride(place) == like.stride(place) for place in wide):
        return tensor.as_strided(like.shape, like.stride())
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor
    )


def per_row(value: PerRow | int, rows: int, device: torch.device) -> PerRow:
    """Return a plain number where all rows have the same (the fast path), else float64[rows]. Fewer values
    than rows are repeated, because a client may train several models."""
    if not isinstance(value, Tensor):
        return float(value)
    flat = value.reshape(-1).double()
    # only on the CPU: reading a value from another device would wait for that device
    if flat.device.type == "cpu" and bool((flat == flat[0]).all()):
        return float(flat[0])
    return to_device(flat.repeat(rows // flat.shape[0]), device)
