"""Puts the kernels in the place of the matrix products of patches in a program of the package: as operations
that vmap, autograd and the compiler know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.models import batched_convolution

from . import kernels
from .layer import Choice

_choices: list[Choice] = []  # operations can be given numbers, not choices
copies: list[str] = []
"""What had to be copied because it did not lie in memory as the kernels read it; for tests."""


@torch.library.custom_op("holdfast_benchmark::convolve", mutates_args=())
def _convolve(x: Tensor, weight: Tensor, bias: Tensor, number: int) -> Tensor:
    own = _choices[number]
    x = _arranged(x, own.reads_innermost, "images")
    return kernels.forward(x, weight.contiguous(), bias.contiguous(), own)[0]


@_convolve.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, number: int) -> Tensor:
    own = _choices[number]
    return kernels.new_images(x, (x.shape[0], *own.shape.result), own.innermost)


@torch.library.custom_op("holdfast_benchmark::of_weights", mutates_args=())
def _of_weights(x: Tensor, g: Tensor, number: int) -> Tensor:
    own = _choices[number]
    x, g = _arranged(x, own.reads_innermost, "images"), _arranged(g, own.innermost, "gradients")
    return kernels.of_weights(x, g, g, own).contiguous()


@_of_weights.register_fake
def _(x: Tensor, g: Tensor, number: int) -> Tensor:
    shape = _choices[number].shape
    return x.new_empty(x.shape[0], shape.outside, shape.patch + 1)


@torch.library.custom_op("holdfast_benchmark::of_images", mutates_args=())
def _of_images(g: Tensor, weight: Tensor, number: int) -> Tensor:
    own = _choices[number]
    g = _arranged(g, own.innermost, "gradients")
    return kernels.of_images(g, g, weight.contiguous(), own)


@_of_images.register_fake
def _(g: Tensor, weight: Tensor, number: int) -> Tensor:
    own = _choices[number]
    return kernels.new_images(g, (g.shape[0], *own.shape.images), own.reads_innermost)


def _arranged(images: Tensor, innermost: bool, what: str) -> Tensor:
    right = kernels.arranged(images, innermost)
    if right.data_ptr() != images.data_ptr():
        copies.append(what)
    return right


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.number = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x = _of_images(g, weight, ctx.number) if ctx.needs_input_grad[0] else None
    of_weight, of_bias = kernels.parted(_of_weights(x, g, ctx.number), _choices[ctx.number])
    return of_x, of_weight, of_bias, None


_convolve.register_autograd(_backward, setup_context=_keep)


@_convolve.register_vmap
def _(
    info: Any, dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor, number: int
) -> tuple[Tensor, int]:
    stacked = [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip((x, weight, bias), dims, strict=False)
    ]
    return _convolve(*stacked, number), 0


@contextmanager
def by_kernels(choices: list[Choice]) -> Iterator[list[Choice]]:
    """While a step is traced, use these choices for the layers they are for; yield those that were used."""
    used: list[Choice] = []
    before = batched_convolution._product

    def product(conv: nn.Conv2d, x: Tensor) -> Tensor:
        for choice in choices:
            if _fits(conv, x, choice):
                used.append(choice)
                _choices.append(choice)
                return _convolve(x, conv.weight, conv.bias, len(_choices) - 1)
        return before(conv, x)

    batched_convolution._product = product
    try:
        yield used
    finally:
        batched_convolution._product = before


def _fits(conv: nn.Conv2d, x: Tensor, choice: Choice) -> bool:
    shape = choice.shape
    usual = conv.bias is not None and conv.stride == conv.dilation == (1, 1)
    found = tuple(x.shape), tuple(conv.weight.shape), conv.padding
    return usual and found == (shape.images, shape.weight, (shape.padding, shape.padding))
