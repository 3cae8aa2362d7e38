"""The kernels as operations that vmap, autograd and the compiler know. They carry all they need as numbers,
so that a step that holds them can be sent to another process, or kept for a later start. Triton is needed to
run them, not to trace them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from .memory_order import arranged, new_images, parted
from .shape import Choice, Mode, Shape
from .use import KernelFailed

VERSION = 1
"""To be raised whenever a kernel changes: compiled code is found again by the arguments of operations."""
_ABOUT = "int[] layer, int[] blocks, str mode, int version"
About = tuple[list[int], list[int], str, int]


def _operation(name: str, tensors: str) -> Any:
    return torch.library.custom_op(
        f"holdfast::{name}", mutates_args=(), schema=f"({tensors}, {_ABOUT}) -> Tensor"
    )


@contextmanager
def _kernels() -> Iterator[Any]:
    """The module of kernels; what fails is said to be one of them."""
    try:
        from . import kernels

        yield kernels
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0][:200]
        raise KernelFailed(f"{type(error).__name__}: {reason}") from error


@_operation("convolve", "Tensor x, Tensor weight, Tensor? bias")
def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *about: Any) -> Tensor:
    own, bias = _choice(about), None if bias is None else bias.contiguous()
    with _kernels() as kernels:
        out: Tensor = kernels.forward(arranged(x, not own.shape.samples), weight.contiguous(), bias, own)
        return out


@_convolve.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *about: Any) -> Tensor:
    return new_images(x, (x.shape[0], *_choice(about).shape.result), True, type_of(x, weight))


@_operation("gradient_of_weights", "Tensor x, Tensor g")
def _of_weights(x: Tensor, g: Tensor, *about: Any) -> Tensor:
    own = _choice(about)
    with _kernels() as kernels:
        out: Tensor = kernels.of_weights(arranged(x, not own.shape.samples), arranged(g, True), own)
        return out


@_of_weights.register_fake
def _(x: Tensor, g: Tensor, *about: Any) -> Tensor:
    shape = _choice(about).shape
    return x.new_empty(x.shape[0], shape.outside, shape.patch + 1, dtype=type_of_sums(x))


@_operation("gradient_of_images", "Tensor g, Tensor weight")
def _of_images(g: Tensor, weight: Tensor, *about: Any) -> Tensor:
    own = _choice(about)
    with _kernels() as kernels:
        out: Tensor = kernels.of_images(arranged(g, True), weight.contiguous(), own)
        return out


@_of_images.register_fake
def _(g: Tensor, weight: Tensor, *about: Any) -> Tensor:
    shape = _choice(about).shape
    return new_images(g, (g.shape[0], *shape.images), not shape.samples, g.dtype)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, choice: Choice) -> Tensor:
    """Convolve the images of each client of a stack with its own weights; within vmap, those of one."""
    return cast(Tensor, _convolve(x, weight, bias, *choice.numbers(), choice.mode, VERSION))


def type_of(x: Tensor, weight: Tensor) -> torch.dtype:
    """The type of a layer's result: bfloat16 where both are."""
    return torch.promote_types(x.dtype, weight.dtype)


def type_of_sums(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _choice(about: tuple[Any, ...]) -> Choice:
    layer, blocks, mode, version = cast(About, about)
    if version != VERSION:
        raise RuntimeError(f"compiled code asks for kernels of version {version}, these are {VERSION}")
    return Choice.of_numbers(layer, blocks, cast(Mode, mode))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.about = inputs
    ctx.of_bias = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x = of_weight = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = _of_images(g, weight, *ctx.about).to(x.dtype)
    if any(ctx.needs_input_grad[1:3]):
        shape: Shape = _choice(tuple(ctx.about)).shape
        of_weight, of_bias = parted(_of_weights(x, g, *ctx.about), shape)
        of_weight = of_weight.to(weight.dtype)
        of_bias = None if ctx.of_bias is None else of_bias.to(ctx.of_bias)
    return of_x, of_weight, of_bias, None, None, None, None


_convolve.register_autograd(_backward, setup_context=_keep)


@_convolve.register_vmap
def _(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
    tensors, about = inputs[:3], inputs[3:]
    stacked = [
        tensor if tensor is None else tensor.expand(info.batch_size, *tensor.shape)
        if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=False)
    ]  # fmt: skip
    return _convolve(*stacked, *about), 0
