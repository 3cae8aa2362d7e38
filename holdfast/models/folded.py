"""Convolution and pooling for a stack of clients on a CPU: what `vmap` does by itself is right, but several times slower.

`vmap` folds the clients of a convolution into its groups, yet those of a pooling into the batch, and copies between the two. Here the
client axis is always folded into the channels and the channels lie innermost in memory, where oneDNN's grouped convolution and PyTorch's
pooling are quick and nothing has to be copied. Values are the same but for the order of sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:  # what vmap itself is made of: the public way to a rule of one's own, an autograd.Function, costs 0.3 ms a call
    from torch._C._functorch import _add_batch_dim, get_unwrapped, is_batchedtensor, maybe_current_level, maybe_get_bdim, maybe_get_level
except ImportError:  # a PyTorch that names them otherwise: vmap's own rules do, which are as right

    def is_batchedtensor(tensor: Tensor) -> bool:
        return False



class FoldedConv2d(nn.Conv2d):
    """A Conv2d; a stack of clients becomes groups."""

    def forward(self, x: Tensor) -> Tensor:
        if not _foldable(x):
            return super().forward(x)
        level, images, n = _fold(x)
        weight, bias = _stack(self.weight, level, n).flatten(0, 1), None if self.bias is None else _stack(self.bias, level, n).flatten()
        return _unfold(F.conv2d(images, weight, bias, self.stride, self.padding, self.dilation, n * self.groups), level, n)


class FoldedMaxPool2d(nn.MaxPool2d):
    """A MaxPool2d; a stack of clients becomes channels."""

    def forward(self, x: Tensor) -> Tensor:
        if not _foldable(x):
            return super().forward(x)
        level, images, n = _fold(x)
        return _unfold(super().forward(images), level, n)


class UnfoldedGroupNorm(nn.GroupNorm):
    """A GroupNorm: PyTorch's asks how its input lies in memory, which vmap cannot say of channels that lie innermost."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous() if is_batchedtensor(x) else x)


def batch_norm(
    x: Tensor, mean: Tensor | None, var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> Tensor:  # fmt: skip
    """F.batch_norm; a stack of clients becomes channels. vmap would apply weight and bias in passes of their own."""
    own = (mean, var, weight, bias)
    if not _foldable(x) or not all(tensor is None or is_batchedtensor(tensor) for tensor in own):
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    level, images, n = _fold(x)
    mean, var, weight, bias = (None if tensor is None else _stack(tensor, level, n).flatten() for tensor in own)
    return _unfold(F.batch_norm(images, mean, var, weight, bias, training, momentum, eps), level, n)


def folded(layer: nn.Module) -> nn.Module:
    """The layer, able to run for a stack where that is quicker. Only PyTorch's own classes: a user's subclass may do anything."""
    if type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
        layer.__class__ = FoldedConv2d
    if type(layer) is nn.MaxPool2d and not layer.return_indices:
        layer.__class__ = FoldedMaxPool2d
    if type(layer) is nn.GroupNorm:
        layer.__class__ = UnfoldedGroupNorm
    return layer


def unfolded(layer: nn.Module) -> nn.Module:
    """The layer as PyTorch has it again."""
    if isinstance(layer, (FoldedConv2d, FoldedMaxPool2d, UnfoldedGroupNorm)):
        layer.__class__ = type(layer).__bases__[0]
    return layer


def _foldable(x: Tensor) -> bool:
    """Whether vmap runs this, directly: under a gradient that is taken inside of vmap its own rules have to do."""
    return is_batchedtensor(x) and maybe_get_level(x) == maybe_current_level() and x.ndim == 4 and x.device.type == "cpu"


def _fold(x: Tensor) -> tuple[int, Tensor, int]:
    """What is [B, C, H, W] to one client as [B, n * C, H, W] with the channels innermost; no copy where they are already."""
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
