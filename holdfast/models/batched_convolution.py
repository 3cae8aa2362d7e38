"""Convolution and pooling for a stack of clients on a CPU: what `vmap` does by itself is right, but several
times slower.

`vmap` folds the clients of a convolution into its groups, yet those of a pooling into the batch, and copies
between the two. Here the client axis is always folded into the channels and the channels lie innermost in
memory, where oneDNN's grouped convolution and PyTorch's pooling are quick and nothing has to be copied.
Values are the same but for the order of sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# what vmap itself is made of: the public way to a rule of one's own, an autograd.Function, costs 0.3 ms a
# call
try:
    from torch._C._functorch import (
        _add_batch_dim,
        get_unwrapped,
        is_batchedtensor,
        maybe_current_level,
        maybe_get_bdim,
        maybe_get_level,
    )
except ImportError:  # a PyTorch that names them otherwise: vmap's own rules do, which are as right

    def is_batchedtensor(tensor: Tensor) -> bool:
        return False


class FoldedConv2d(nn.Conv2d):
    """A Conv2d; a stack of clients becomes groups, or where a compiler asks for it, matrix products of
    patches."""

    def forward(self, x: Tensor) -> Tensor:
        if _products and self.groups == 1 and not isinstance(self.padding, str):
            return _product(self, x)
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
    """A MaxPool2d; a stack of clients becomes channels."""

    def forward(self, x: Tensor) -> Tensor:
        if not _foldable(x):
            return super().forward(x)
        level, images, n = _fold(x)
        return _unfold(super().forward(images), level, n)


class UnfoldedGroupNorm(nn.GroupNorm):
    """A GroupNorm: PyTorch's asks how its input lies in memory, which vmap cannot say of channels that lie
    innermost."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous() if is_batchedtensor(x) else x)


class UnlearnedPadding(nn.Embedding):
    """An Embedding with a row for padding: vmap forgets that this row learns nothing."""

    padding_idx: int

    def forward(self, x: Tensor) -> Tensor:
        found = F.embedding(x, self.weight, None, self.max_norm, self.norm_type, self.scale_grad_by_freq)
        return torch.where(x.eq(self.padding_idx)[..., None], found.detach(), found)


_products: list[bool] = []
_ALIGNED = 8  # a GPU multiplies matrices of other widths several times slower


@contextmanager
def as_products() -> Iterator[None]:
    """While a step is traced for a compiler: convolutions of different weights as one batched matrix product,
    which it makes quick. Run as they stand they are slow."""
    _products.append(True)
    try:
        yield
    finally:
        _products.pop()


def _product(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """One matrix product per client over all samples of its batch, not one per sample: its weight gradient
    then needs no further sum."""
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
    """Sums of patches back into images: the gradient of F.unfold. A compiler's own way adds with atomics,
    whose order, and so whose last bits, change from run to run, or else is slow; this way every pixel gathers
    what belongs to it, in a fixed order."""
    out = [
        (side + 2 * p - d * (k - 1) - 1) // s + 1
        for side, p, d, k, s in zip(size, padding, dilation, kernel, stride, strict=True)
    ]
    pieces = patches.reshape(patches.shape[0], -1, *kernel, *out)
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
    return total[..., padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]


def _spread(images: Tensor, stride: list[int]) -> Tensor:
    """Images with stride - 1 zeros between their pixels."""
    if stride[0] == stride[1] == 1:
        return images
    h, w = images.shape[-2:]
    out = images.new_zeros(*images.shape[:-2], (h - 1) * stride[0] + 1, (w - 1) * stride[1] + 1)
    out[..., :: stride[0], :: stride[1]] = images
    return out


DECOMPOSITIONS = {torch.ops.aten.col2im.default: _fold_back}
"""What a step is traced with, so that its compiled form is quick and has the same bits every time."""


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
    """F.batch_norm; a stack of clients becomes channels. vmap would apply weight and bias in passes of their
    own."""
    own = (mean, var, weight, bias)
    if not _foldable(x) or not all(tensor is None or is_batchedtensor(tensor) for tensor in own):
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    level, images, n = _fold(x)
    mean, var, weight, bias = (
        None if tensor is None else _stack(tensor, level, n).flatten() for tensor in own
    )
    return _unfold(F.batch_norm(images, mean, var, weight, bias, training, momentum, eps), level, n)


def folded(layer: nn.Module) -> nn.Module:
    """The layer, able to run for a stack where that is quicker. Only PyTorch's own classes: a user's subclass
    may do anything."""
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
    """The layer as PyTorch has it again."""
    if isinstance(layer, (FoldedConv2d, FoldedMaxPool2d, UnfoldedGroupNorm)):
        layer.__class__ = type(layer).__bases__[0]
    return layer


def _foldable(x: Tensor) -> bool:
    """Whether vmap runs this, directly: under a gradient that is taken inside of vmap its own rules have to
    do."""
    return (
        is_batchedtensor(x)
        and maybe_get_level(x) == maybe_current_level()
        and x.ndim == 4
        and x.device.type == "cpu"
    )


def _fold(x: Tensor) -> tuple[int, Tensor, int]:
    """What is [B, C, H, W] to one client as [B, n * C, H, W] with the channels innermost; no copy where they
    are already."""
    level = maybe_get_level(x)
    whole = get_unwrapped(x).movedim(maybe_get_bdim(x), 1)
    return level, whole.flatten(1, 2).to(memory_format=torch.channels_last), whole.shape[1]


def _unfold(x: Tensor, level: int, n: int) -> Tensor:
    return _add_batch_dim(x.unflatten(1, (n, -1)), 1, level)


def _stack(parameter: Tensor, level: int, n: int) -> Tensor:
    """[n, ...]: every client's own, or the same for all."""
    if is_batchedtensor(parameter) and maybe_get_level(parameter) == level:
        return get_unwrapped(parameter).movedim(maybe_get_bdim(parameter), 0)
    return parameter.expand(n, *parameter.shape)
