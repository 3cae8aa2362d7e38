"""GroupNorm and BatchNorm by formulas of their own, forwards and backwards, for programs and for
activations in bfloat16.

PyTorch's layers are right for one model on its own. In a stack, vmap applies weight and bias in passes of
their own and keeps what lies between for the backward pass, and BatchNorm that skips padded samples has to
be written as a chain of operations, of which autograd keeps four results as large as the activations. Here
only the input is kept. Statistics, sums and the gradients of weight and bias are float32 (float64 for
float64); so is the output where the step is compiled, otherwise it has the type of the input.

Every sum goes over the positions of one channel first, then over channels or samples of what is left: a
compiler makes one pass of it in either memory order, channels innermost or outermost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_own: list[bool] = []


@contextmanager
def own_formulas() -> Iterator[None]:
    """Within this context GroupNorm and BatchNorm use the formulas of this file."""
    _own.append(True)
    try:
        yield
    finally:
        _own.pop()


def own_formulas_asked() -> bool:
    """Whether this is within `own_formulas`."""
    return bool(_own)


def group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """F.group_norm with statistics in float32."""
    out: Tensor = _GroupNorm.apply(x, weight, bias, groups, eps)[0]
    return out


def masked_batch_norm(
    x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise by the statistics of the samples whose mask is 1; return also the mean and the biased
    variance of each channel, without gradients."""
    out: tuple[Tensor, Tensor, Tensor] = _BatchNorm.apply(x, mask, weight, bias, eps)
    return out


class _GroupNorm(torch.autograd.Function):
    """Return the normalised input, and for each sample and channel the mean and 1 / deviation of its
    group."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = _wide(x)
        mean, rstd = _of_groups(own, groups, eps)
        return _normalised(own, mean, rstd, weight, bias, x), mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, ctx.groups, ctx.eps = inputs
        ctx.biased = bias is not None
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        own, slope = _wide(x), _wide(grad)
        if torch.is_grad_enabled():  # a second derivative may follow, and statistics depend on x
            mean, rstd = _of_groups(own, ctx.groups, ctx.eps)
        shift, scale = _slopes(own, slope, mean, rstd)  # of each sample and channel
        factor = torch.ones_like(mean[0]) if weight is None else weight
        down, along = (
            _mean_of_groups(each * factor, ctx.groups) / _positions(own) for each in (shift, scale)
        )
        return (
            _of_input(own, slope, mean, rstd, factor, down, along, x),
            None if weight is None else scale.sum(0).to(weight.dtype),
            shift.sum(0) if ctx.biased else None,
            None,
            None,
        )


class _BatchNorm(torch.autograd.Function):
    """Return the normalised input, and mean and biased variance of each channel over the real samples."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = _wide(x)
        mean, var = _of_batch(own, mask)
        return _normalised(own, mean, (var + eps).rsqrt(), weight, bias, x), mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, mask, weight, bias, ctx.eps = inputs
        ctx.biased = bias is not None
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, mask, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, mask, weight, mean, var = ctx.saved_tensors
        own, slope = _wide(x), _wide(grad)
        if torch.is_grad_enabled():  # a second derivative may follow, and statistics depend on x
            mean, var = _of_batch(own, mask)
        rstd = (var + ctx.eps).rsqrt()
        shift, scale = (each.sum(0) for each in _slopes(own, slope, mean, rstd))
        factor = torch.ones_like(mean) if weight is None else weight
        share = _shares(own, mask)[:, None] / _positions(
            own
        )  # what each position counts for in the statistics
        down, along = shift * factor * share, scale * factor * share
        return (
            _of_input(own, slope, mean, rstd, factor, down, along, x),
            None,
            None if weight is None else scale.to(weight.dtype),
            shift if ctx.biased else None,
            None,
        )


def _wide(x: Tensor) -> Tensor:
    """Return [samples, channels, *positions], at least in float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    return wide if x.ndim > 2 else wide[..., None]


def _type_of_output(x: Tensor) -> torch.dtype:
    """A compiler computes an activation function of float32 and the input of the next product in one pass,
    and again in the backward pass in place of reading it; by themselves, layers hand on the type of the
    input."""
    return torch.float32 if _own and x.dtype != torch.float64 else x.dtype


def _positions(x: Tensor) -> int:
    return x[0, 0].numel()


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Return numbers of channels, or of samples and channels, for all positions of x."""
    return values[(..., *[None] * (x.ndim - 2))]


def _of_groups(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / deviation of each channel's group, [samples, channels]: the variance of a group
    is the mean of its channels' variances and the variance of their means."""
    var, mean = torch.var_mean(x, list(range(2, x.ndim)), correction=0)
    own = _mean_of_groups(mean, groups)
    spread = _mean_of_groups(var + (mean - own).square(), groups)
    return own, (spread + eps).rsqrt()


def _mean_of_groups(values: Tensor, groups: int) -> Tensor:
    """Replace each of [samples, channels] by the mean of its group."""
    parts = values.unflatten(1, (groups, -1))
    return parts.mean(2, keepdim=True).expand_as(parts).flatten(1)


def _of_batch(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each channel over the samples that count."""
    var, mean = torch.var_mean(x, list(range(2, x.ndim)), correction=0)
    share = _shares(x, mask)[:, None]
    own = (mean * share).sum(0)
    return own, ((var + (mean - own).square()) * share).sum(0)


def _shares(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return each sample's share of the real ones."""
    if mask is None:
        return x.new_full((x.shape[0],), 1 / x.shape[0])
    return mask.to(x.dtype) / mask.to(x.dtype).sum().clamp(min=1)


def _normalised(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, like: Tensor
) -> Tensor:
    scale = rstd if weight is None else rstd * weight
    if _own:
        shift = -mean * scale if bias is None else bias - mean * scale
        out = x * _along(_written_down(scale), x) + _along(_written_down(shift), x)
    else:
        out = (x - _along(mean, x)) * _along(scale, x)
        out = out if bias is None else out + _along(bias, x)
    return _shaped(out, like).to(_type_of_output(like))


def _written_down(values: Tensor) -> Tensor:
    """The same; a compiler writes them down. It computes again what reads few tensors, and otherwise writes
    down the whole layer's output, as large as the activations, where a few numbers for each channel do."""
    return values.as_strided(values.shape, values.stride())


def _slopes(x: Tensor, slope: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over the positions, [samples, channels], of the slope and of the slope times the
    normalised input: what each sample adds to the gradients of bias and weight."""
    axes = list(range(2, x.ndim))
    return slope.sum(axes), (slope * (x - _along(mean, x))).sum(axes) * rstd


def _of_input(
    x: Tensor,
    slope: Tensor,
    mean: Tensor,
    rstd: Tensor,
    factor: Tensor,
    down: Tensor,
    along: Tensor,
    like: Tensor,
) -> Tensor:
    """Return the gradient of the input: the slope without what changes only mean and deviation."""
    steep = _along(rstd * factor, x) * slope
    back = _along(rstd.square() * along, x) * (x - _along(mean, x))
    return _shaped(steep - back - _along(rstd * down, x), like).to(like.dtype)


def _shaped(values: Tensor, like: Tensor) -> Tensor:
    """Return values in the shape of the layer's input."""
    return values if like.ndim > 2 else values[..., 0]
