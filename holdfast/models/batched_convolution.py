"""Convolution and pooling for a stack of clients: `vmap` alone is correct, but several times slower.

`vmap` folds the clients of a convolution into its groups, but those of a pooling into the batch, and copies
between the two. On a CPU the client axis is always folded into the channels here, and the channels are
innermost in memory, where oneDNN's grouped convolution and PyTorch's pooling are fast and nothing is copied.
In a step that is compiled, a convolution is one matrix product of patches per client, or a kernel that forms
patches itself (stacked_convolution). Values are the same except for the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.models.half_activations import rounding
from holdfast.models.normalisation import group_norm, own_formulas_asked
from holdfast.models.stacked_convolution.shape import Choice
from holdfast.models.stacked_convolution.use import Choose, shape_of

# internals of vmap: the public way, an autograd.Function, costs 0.3 ms per call
try:
    from torch._C._functorch import (
        _add_batch_dim,
        get_unwrapped,
        is_batchedtensor,
        maybe_current_level,
        maybe_get_bdim,
        maybe_get_level,
    )
except (
    ImportError
):  # another PyTorch names them differently: vmap's own rules are used, which are also correct

    def is_batchedtensor(tensor: Tensor) -> bool:
        return False


class FoldedConv2d(nn.Conv2d):
    """A Conv2d that turns a stack of clients into groups, or where a compiler needs it into kernels or matrix
    products of patches."""

    def forward(self, x: Tensor) -> Tensor:
        if _products and self.groups == 1 and not isinstance(self.padding, str):
            choice = _kernels(self, x)
            return _product(self, x) if choice is None else _by_kernels(self, x, choice)
        if not _foldable(x):
            return super().forward(x)
        level, images, n = _fold(x)
        weight, bias = (
            _stack(self.weight, level, n).flatten(0, 1),
            None if self.bias is None else _stack(self.bias, level, n).flatten(),
        )
        return _unfold(
            F.conv2d(images, weight, bias, self.stride, self.padding, self.dilation, n * self.groups),
            level,
            n,
        )


class FoldedMaxPool2d(nn.MaxPool2d):
    """A MaxPool2d that turns a stack of clients into channels."""

    def forward(self, x: Tensor) -> Tensor:
        if not _foldable(x):
            return super().forward(x)
        level, images, n = _fold(x)
        return _unfold(super().forward(images), level, n)


class UnfoldedGroupNorm(nn.GroupNorm):
    """A GroupNorm that works under vmap: PyTorch's asks for the memory layout, which vmap cannot give when
    channels are innermost."""

    returns_wide = True

    def forward(self, x: Tensor) -> Tensor:
        if has_own_formula(x):
            with torch.autocast(x.device.type, enabled=False):
                return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return super().forward(x.contiguous() if is_batchedtensor(x) else x)


class UnlearnedPadding(nn.Embedding):
    """An Embedding with a padding row, which vmap would otherwise train."""

    padding_idx: int

    def forward(self, x: Tensor) -> Tensor:
        found = F.embedding(x, self.weight, None, self.max_norm, self.norm_type, self.scale_grad_by_freq)
        return torch.where(x.eq(self.padding_idx)[..., None], found.detach(), found)


_products: list[Choose | None] = []
_ALIGNED = 8  # a GPU multiplies matrices of other widths several times slower


@contextmanager
def as_products(choose: Choose | None = None) -> Iterator[None]:
    """While a step is traced for a compiler, compute convolutions of different weights as one batched matrix
    product, which the compiler makes fast. Without a compiler they are slow. Those of a stack for which
    `choose` names kernels are computed by these."""
    _products.append(choose)
    try:
        yield
    finally:
        _products.pop()


def _kernels(conv: nn.Conv2d, x: Tensor) -> Choice | None:
    """Return how kernels compute this layer, where they do: for a stack, each client with its own images and
    weights. Under a gradient taken inside vmap, products are needed."""
    choose = _products[-1]
    if choose is None or not all(_is_stacked(tensor) for tensor in (x, conv.weight)):
        return None
    shape = shape_of(conv, x, samples=not get_unwrapped(x).requires_grad)
    return None if shape is None else choose(shape)


def _by_kernels(conv: nn.Conv2d, x: Tensor, choice: Choice) -> Tensor:
    # registering operations takes a while, and most programs need none
    from holdfast.models.stacked_convolution.operations import convolved

    return convolved(x, conv.weight, conv.bias, choice)


def _product(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Compute one matrix product per client over all samples of its batch, not one per sample: its weight
    gradient then needs no further sum."""
    (h, w), padding = x.shape[-2:], conv.padding
    assert not isinstance(padding, str)
    patches = F.unfold(x, conv.kernel_size, conv.dilation, padding, conv.stride).transpose(0, 1).flatten(1)
    weight = conv.weight.flatten(1)
    odd = -weight.shape[1] % _ALIGNED
    if odd:
        patches, weight = F.pad(patches, (0, 0, 0, odd)), F.pad(weight, (0, odd))
    out = weight @ patches
    if conv.bias is not None:
        out = out + conv.bias[:, None]
    sides = [
        (side + 2 * p - d * (k - 1) - 1) // s + 1
        for side, p, d, k, s in zip(
            (h, w), padding, conv.dilation, conv.kernel_size, conv.stride, strict=True
        )
    ]
    return out.unflatten(1, (x.shape[0], *sides)).transpose(0, 1).contiguous()


def _fold_back(
    patches: Tensor,
    size: list[int],
    kernel: list[int],
    dilation: list[int],
    padding: list[int],
    stride: list[int],
) -> Tensor:
    """Sum patches back into images: the gradient of F.unfold. A compiler would add with atomics, whose order,
    and so the last bits, change from run to run, or be slow; here every pixel gathers its values in a fixed
    order, as float32 where patches are bfloat16."""
    out = [
        (side + 2 * p - d * (k - 1) - 1) // s + 1
        for side, p, d, k, s in zip(size, padding, dilation, kernel, stride, strict=True)
    ]
    wide = patches.float() if patches.dtype == torch.bfloat16 else patches
    pieces = wide.reshape(patches.shape[0], -1, *kernel, *out)
    total = None
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            start = (i * dilation[0], j * dilation[1])
            piece = _spread(pieces[:, :, i, j], stride)
            after = [
                side + 2 * p - piece.shape[axis] - first
                for axis, (side, p, first) in zip(
                    (-2, -1), zip(size, padding, start, strict=True), strict=True
                )
            ]
            here = F.pad(piece, (start[1], after[1], start[0], after[0]))
            total = here if total is None else total + here
    assert total is not None
    inside = total[..., padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]
    return inside.to(patches.dtype)


def has_own_formula(x: Tensor) -> bool:
    """Whether GroupNorm and BatchNorm take a pass over this input as in normalisation.py: in a program that
    is compiled, with activations in bfloat16, and in every stack on another device than the CPU."""
    return own_formulas_asked() or rounding() or (x.device.type != "cpu" and is_batchedtensor(x))


def _spread(images: Tensor, stride: list[int]) -> Tensor:
    """Return images with stride - 1 zeros between their pixels."""
    if stride[0] == stride[1] == 1:
        return images
    h, w = images.shape[-2:]
    out = images.new_zeros(*images.shape[:-2], (h - 1) * stride[0] + 1, (w - 1) * stride[1] + 1)
    out[..., :: stride[0], :: stride[1]] = images
    return out


DECOMPOSITIONS = {torch.ops.aten.col2im.default: _fold_back}
"""Replacements with which a step is traced, so that its compiled form is fast and gives the same bits every
time."""


def batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """F.batch_norm that turns a stack of clients into channels. vmap would apply weight and bias in separate
    passes."""
    own = (mean, var, weight, bias)
    if not _foldable(x) or not all(tensor is None or is_batchedtensor(tensor) for tensor in own):
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    level, images, n = _fold(x)
    mean, var, weight, bias = (
        None if tensor is None else _stack(tensor, level, n).flatten() for tensor in own
    )
    return _unfold(F.batch_norm(images, mean, var, weight, bias, training, momentum, eps), level, n)


def folded(layer: nn.Module) -> nn.Module:
    """Make the layer able to run for a stack where that is faster. Only for PyTorch's own classes: a user's
    subclass may do anything."""
    if type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
        layer.__class__ = FoldedConv2d
    if type(layer) is nn.MaxPool2d and not layer.return_indices:
        layer.__class__ = FoldedMaxPool2d
    if type(layer) is nn.GroupNorm:
        layer.__class__ = UnfoldedGroupNorm
    if type(layer) is nn.Embedding:
        layer.sparse = False  # its gradients are added to whole tensors
        if layer.padding_idx is not None:
            layer.__class__ = UnlearnedPadding
    return layer


def unfolded(layer: nn.Module) -> nn.Module:
    """Restore the layer as PyTorch has it."""
    if isinstance(layer, (FoldedConv2d, FoldedMaxPool2d, UnfoldedGroupNorm)):
        layer.__class__ = type(layer).__bases__[0]
    return layer


def _foldable(x: Tensor) -> bool:
    """Return whether vmap runs this directly: under a gradient taken inside vmap, its own rules are
    needed."""
    return _is_stacked(x) and x.ndim == 4 and x.device.type == "cpu"


def _is_stacked(x: Tensor) -> bool:
    """Return whether each client of the stack has its own tensor here, of which no gradient is taken inside
    vmap."""
    return is_batchedtensor(x) and maybe_get_level(x) == maybe_current_level()


def _fold(x: Tensor) -> tuple[int, Tensor, int]:
    """Return what is [B, C, H, W] for one client as [B, n * C, H, W] with the channels innermost; no copy if
    they are already."""
    level = maybe_get_level(x)
    whole = get_unwrapped(x).movedim(maybe_get_bdim(x), 1)
    return level, whole.flatten(1, 2).to(memory_format=torch.channels_last), whole.shape[1]


def _unfold(x: Tensor, level: int, n: int) -> Tensor:
    return _add_batch_dim(x.unflatten(1, (n, -1)), 1, level)


def _stack(parameter: Tensor, level: int, n: int) -> Tensor:
    """Return [n, ...]: each client's own parameter, or the same for all."""
    if is_batchedtensor(parameter) and maybe_get_level(parameter) == level:
        return get_unwrapped(parameter).movedim(maybe_get_bdim(parameter), 0)
    return parameter.expand(n, *parameter.shape)
