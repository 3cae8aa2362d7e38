"""Prepare a user's module for stacks: Dropout by key, BatchNorm that ignores padding, parameters as one
vector.

Two layers of PyTorch depend on more than their input and parameters. Both get what they need as extra
buffers, which `torch.func.functional_call` can swap like parameters: no global state, nothing that `vmap`
refuses. What is drawn by functions inside a forward pass, as in attention, is in keyed_draws.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from holdfast.core.device import Precision
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout
from holdfast.core.keys import Key, combine, to_uniform
from holdfast.models.batched_convolution import batch_norm, folded, has_own_formula, unfolded
from holdfast.models.calling import stackable
from holdfast.models.features import NO_HEAD
from holdfast.models.half_activations import computing, rounded, rounded_names, rounding
from holdfast.models.keyed_draws import ALWAYS, KeyedDraws, UnkeyedDraw
from holdfast.models.normalisation import masked_batch_norm
from holdfast.models.own_module import with_head

T = TypeVar("T")
MASK = "padding_mask"
KEY = "dropout_key"


class Network:
    """One architecture: a template module, its layout, and its head; parameters always come from outside as
    vectors. `begin` makes the module that a run starts from, where it is not a fresh one."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        head: str | None = "head",
        signature: str = "",
        dtype: torch.dtype = torch.float32,
        begin: Callable[[], nn.Module] | None = None,
    ):
        self._make, self._begin, self.head_name, self.dtype = make, begin or make, head, dtype
        original = make()
        self.layout = Layout.of(original, head)
        if not self.layout.parameters:
            raise ConfigError("model: the module has no parameters")
        with_head(original, head)
        self.signature = (
            signature or f"{type(original).__module__}.{type(original).__qualname__}@{id(make):x}"
        )
        self.module = prepared(copy.deepcopy(original)).to(dtype)
        self.innermost = self.folded = True
        """On a CPU, images may be stored with their channels innermost, which is faster: for one client, and
        for stacks."""
        self.keyed = [name for name, m in self.module.named_modules() if isinstance(m, _KeyedDropout)]
        self.masked = [name for name, m in self.module.named_modules() if isinstance(m, _MaskedBatchNorm)]
        self.draws = any(isinstance(m, ALWAYS) for m in self.module.modules())
        """Whether functions of the model or the loss draw random numbers, which are then drawn by key. For
        other models it becomes true when they first draw: most never do, and are faster without."""
        self.wider: dict[object, Network] = {}
        """Networks around this one, with further tensors (widened.py)."""

    def initial(self, key: Key) -> Tensor:
        """The start vector: built under a seed of its own, so that it neither reads nor changes other random
        state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key.seed())
            module = self._begin()
        return (
            self.layout.flatten(
                {**dict(module.named_parameters()), **dict(module.named_buffers())}, self.dtype
            )
            .detach()
            .clone()
        )

    @property
    def head(self) -> Tensor:
        """bool[size]: the entries of the head; the rest is the backbone."""
        if not self.head_name:
            raise ConfigError(NO_HEAD)
        return self.layout.under(self.head_name)

    @property
    def normalisation(self) -> Tensor:
        """bool[size]: the entries of BatchNorm layers, their running statistics included."""
        return self.layout.mask(lambda slot: slot.name.rpartition(".")[0] in self.masked)

    def ordered(self, x: Tensor) -> Tensor:
        """Return images in the memory order that is fast on a CPU: pooling and small convolutions are up to
        ten times faster, and layers keep the order."""
        quick = self.innermost and x.ndim == 4 and x.device.type == "cpu"
        return x.to(memory_format=torch.channels_last) if quick else x

    def attempt(self, work: Callable[[], T], stacked: bool) -> T:
        """Run some work with the module. If it fails, the memory order may be the reason: then it is run
        again in PyTorch's own order, which is used from then on, because a user's `x.view(len(x), -1)`
        depends on it. One client and stacks fall back separately, so that the bits of one plan do not depend
        on whether the other was tried. A model that draws random numbers itself is run again with its draws
        by key."""
        try:
            return work()
        except UnkeyedDraw:
            if self.draws:
                raise
            self.draws = True
            return self.attempt(work, stacked)
        except RuntimeError:
            if not (self.folded if stacked else self.innermost):
                raise
            if stacked:
                self.folded = False
                for layer in self.module.modules():
                    unfolded(layer)
            else:
                self.innermost = False
            return work()

    @property
    def needs_key(self) -> bool:
        """Whether a training step draws random numbers, beyond the order of its samples."""
        return bool(self.keyed) or self.draws

    def computing(self, device: torch.device, precision: Precision) -> AbstractContextManager[None]:
        """Within this context the model and its loss compute with this precision."""
        return computing(self.module, self.head_name, device, precision)

    def computed_with(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters as layers compute with them, within `computing`."""
        if not rounding():
            return dict(params)
        return {name: rounded(p) if name in self._rounded_names else p for name, p in params.items()}

    @cached_property
    def _rounded_names(self) -> frozenset[str]:
        return rounded_names(self.module)

    def drawing(self, key: Tensor | None) -> AbstractContextManager[object]:
        """Within this context the functions of a forward pass draw by this key; without a key, as in
        evaluation, they may not draw."""
        return KeyedDraws(key) if self.draws else nullcontext()

    def context(self, mask: Tensor | None, key: Tensor | None, prefix: str = "") -> dict[str, Tensor]:
        """Return the extra buffers for one forward pass of one client: which samples are real, and the key
        for Dropout."""
        out = {}
        if mask is not None:
            out.update({f"{prefix}{name}.{MASK}": mask for name in self.masked})
        if key is not None:
            out.update({f"{prefix}{name}.{KEY}": key for name in self.keyed})
        return out

    def fresh(self) -> nn.Module:
        """Return the module as it is built."""
        return self._make()

    def load(self, vector: Tensor, dtype: torch.dtype | None = None) -> nn.Module:
        """Return an ordinary module, as the user wrote it, that holds this model."""
        module = self._make() if dtype is None else self._make().to(dtype)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, value in self.layout.tensors(vector.detach().cpu()).items():
                own[name].copy_(value)
        return module


class _KeyedDropout(nn.Module):
    """Dropout whose mask is a hash of (key, layer, position): the same for a client alone and in a stack."""

    dropout_key: Tensor

    def __init__(self, p: float, layer: int, channels: bool):
        super().__init__()
        self.p, self.layer, self.channels = p, layer, channels
        self._last, self._calls = torch.zeros(0), 0
        self.register_buffer(KEY, torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        shape = [*x.shape[:2], *[1] * (x.ndim - 2)] if self.channels else list(x.shape)
        counter = torch.arange(torch.Size(shape).numel(), device=x.device).view(shape)
        # a layer that is used several times in one pass, under one key, draws a new mask each time
        self._calls = self._calls + 1 if self._last is self.dropout_key else 0
        self._last = self.dropout_key
        layer = self.layer + (self._calls << 32)
        fine = torch.float32 if rounding() else x.dtype  # bfloat16 is too coarse to draw with a probability
        keep = to_uniform(combine(combine(self.dropout_key, layer), counter), fine) >= self.p
        return torch.where(keep, x / (1.0 - self.p), torch.zeros((), dtype=x.dtype, device=x.device))


class _MaskedBatchNorm(nn.Module):
    """BatchNorm whose batch statistics count real samples only (a padded batch would shift them), with the
    original's tensor names."""

    returns_wide = True
    padding_mask: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, original: nn.modules.batchnorm._BatchNorm):
        super().__init__()
        self.eps, self.momentum = original.eps, original.momentum
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(original, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(original, name))
        self.register_buffer(MASK, torch.ones(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        if self._has_own_formula(x):
            mask = self.padding_mask if self.padding_mask.shape[0] else None
            with torch.autocast(x.device.type, enabled=False):
                out, mean, var = masked_batch_norm(x, mask, self.weight, self.bias, self.eps)
            real = x.new_full((), x.shape[0], dtype=mean.dtype) if mask is None else mask.sum().clamp(min=1)
            self._follow(mean, var, real * x[0, 0].numel())
            return out
        if not self.padding_mask.shape[0] and self.momentum is not None and x.numel() > x.shape[1]:
            if self.training and self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            return batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum, self.eps
            )
        mean, var, count = self._statistics(x)
        self._follow(mean.detach(), var.detach(), count)
        view = [1, -1, *[1] * (x.ndim - 2)]
        out = (x - mean.view(view)) / torch.sqrt(var.view(view) + self.eps)
        if self.weight is not None and self.bias is not None:
            out = out * self.weight.view(view) + self.bias.view(view)
        return out

    def _has_own_formula(self, x: Tensor) -> bool:
        return has_own_formula(x) or (x.device.type != "cpu" and bool(self.padding_mask.shape[0]))

    def _follow(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Move the running statistics towards those of this batch."""
        if (
            self.training
            and self.running_mean is not None
            and self.running_var is not None
            and self.num_batches_tracked is not None
        ):
            self.num_batches_tracked.add_(1)
            factor = (
                self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.to(mean.dtype)
            )
            unbiased = var * (count / (count - 1).clamp(min=1))
            self.running_mean.copy_(self.running_mean * (1 - factor) + mean * factor)
            self.running_var.copy_(self.running_var * (1 - factor) + unbiased * factor)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, biased variance and number of values per channel."""
        axes = [0, *range(2, x.ndim)]
        weight = (
            self.padding_mask.to(x.dtype)
            if self.padding_mask.shape[0]
            else torch.ones(x.shape[0], dtype=x.dtype, device=x.device)
        )
        weight = weight.view(-1, *[1] * (x.ndim - 1))
        count = (weight.sum() * (x[0, 0].numel())).clamp(min=1)
        mean = (x * weight).sum(axes) / count
        centred = (x - mean.view(1, -1, *[1] * (x.ndim - 2))) ** 2
        return mean, (centred * weight).sum(axes) / count, count


def prepared(module: nn.Module) -> nn.Module:
    """Replace the layers that depend on hidden state, in place; a layer that is used in several places is
    replaced in all of them."""
    stackable(module)
    swaps: dict[nn.Module, nn.Module] = {}
    # where attention draws by key, so do all layers: their tensors may have the batch on another axis
    by_key = any(isinstance(m, nn.MultiheadAttention) and m.dropout > 0 for m in module.modules())
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            swap = None if child is None else swaps.get(child) or _replacement(child, len(swaps), by_key)
            if child is not None and swap is not None:
                swaps[child] = swap
                setattr(parent, name, swap)
            elif child is not None:
                folded(child)
    return _replacement(module, len(swaps), by_key) or folded(module)


def _replacement(child: nn.Module, layer: int, by_key: bool = False) -> nn.Module | None:
    if isinstance(child, nn.SyncBatchNorm):
        raise ConfigError(
            "model: SyncBatchNorm has no meaning for separate clients; use BatchNorm or GroupNorm"
        )
    if isinstance(child, nn.modules.batchnorm._BatchNorm):
        return _MaskedBatchNorm(child)
    if by_key:
        return None
    if isinstance(child, nn.Dropout):
        return _KeyedDropout(child.p, layer, channels=False)
    if isinstance(child, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
        return _KeyedDropout(child.p, layer, channels=True)
    return None
