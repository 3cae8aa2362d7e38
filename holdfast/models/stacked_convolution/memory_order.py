"""How images, weights and their gradients lie in memory where kernels read and write them: the clients are
the first axis, and channels are innermost, but for samples."""

from __future__ import annotations

import torch
from torch import Tensor

from .shape import Shape


def new_images(like: Tensor, shape: tuple[int, ...], innermost: bool, dtype: torch.dtype) -> Tensor:
    """Return new images [n, batch, channels, h, w]."""
    n, batch, channels, *sides = shape
    if innermost:
        return like.new_empty(n, batch, *sides, channels, dtype=dtype).movedim(-1, 2)
    return like.new_empty(shape, dtype=dtype)


def arranged(images: Tensor, innermost: bool) -> Tensor:
    """Return images as kernels read them; no copy if they lie so already."""
    return images.movedim(2, -1).contiguous().movedim(-1, 2) if innermost else images.contiguous()


def parted(whole: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return views of the gradients of weights and of biases in [n, outside, patch + 1]."""
    sides, weight = (shape.kernel, shape.kernel), whole[..., :-1]
    if shape.samples:
        return weight.unflatten(2, (shape.inside, *sides)), whole[..., -1]
    return weight.unflatten(2, (*sides, shape.inside)).movedim(-1, 2), whole[..., -1]
