"""One update of a stack of parameters: weight decay, pull to a target, momentum, step. Each setting is one
number, or one number per row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.core.device import to_device

PerRow = float | Tensor
"""A number for all rows, or a tensor with one number per row; a tensor without an axis is one number in the
memory of a device."""


@dataclass
class Sgd:
    """SGD on lists of [m, ...] tensors, in place. `momenta`, `targets` and `masks` are lists of the same
    form, or None."""

    lr: PerRow
    momentum: PerRow = 0.0
    weight_decay: PerRow = 0.0
    pull: PerRow = 0.0
    momenta: list[Tensor] | None = None
    targets: list[Tensor] | None = None
    masks: list[Tensor] | None = None

    def rows(self, part: slice | int) -> Sgd:
        """Return the same update for some rows; an int selects a single client, without the leading axis."""

        def cut(value: PerRow) -> PerRow:
            if not isinstance(value, Tensor):
                return value
            return float(value[part]) if isinstance(part, int) else value[part]

        def cut_all(values: list[Tensor] | None) -> list[Tensor] | None:
            return None if values is None else [v[part] for v in values]

        return Sgd(
            cut(self.lr),
            cut(self.momentum),
            cut(self.weight_decay),
            cut(self.pull),
            cut_all(self.momenta),
            cut_all(self.targets),
            cut_all(self.masks),
        )

    def arranged(self, grads: list[Tensor]) -> Sgd:
        """Return the same update with its tensors in the memory order of these gradients."""

        def all_arranged(values: list[Tensor] | None) -> list[Tensor] | None:
            return None if values is None else [arranged(v, g) for v, g in zip(values, grads, strict=True)]

        return replace(
            self,
            momenta=all_arranged(self.momenta),
            targets=all_arranged(self.targets),
            masks=all_arranged(self.masks),
        )

    def apply(self, params: list[Tensor], grads: list[Tensor]) -> None:
        if not params:
            return
        if not _zero(self.weight_decay):
            grads = _plus(grads, _times(params, self.weight_decay))
        if self.targets is not None and not _zero(self.pull):
            away = list(torch._foreach_sub(params, self.targets))
            grads = _plus(grads, _times(away, self.pull))
        if self.momenta is not None:
            for buffer, scaled, grad in zip(
                self.momenta, _times(self.momenta, self.momentum), grads, strict=True
            ):
                buffer.copy_(scaled + grad)
            grads = self.momenta
        if self.masks is not None:
            # `where`, not a product with 0: a masked entry stays even when its gradient is not finite
            grads = [
                torch.where(mask, grad, torch.zeros_like(grad))
                for mask, grad in zip(self.masks, grads, strict=True)
            ]
        if isinstance(self.lr, Tensor):
            torch._foreach_sub_(params, _times(grads, self.lr))
        else:
            torch._foreach_add_(params, grads, alpha=-self.lr)


def _zero(value: PerRow) -> bool:
    return not isinstance(value, Tensor) and value == 0.0


def _plus(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_add(a, b))


def _times(tensors: list[Tensor], value: PerRow) -> list[Tensor]:
    if isinstance(value, Tensor) and value.ndim == 0:
        return list(torch._foreach_mul(tensors, value.to(tensors[0].dtype)))
    if isinstance(value, Tensor):
        return [t * value.to(t.dtype).view(-1, *[1] * (t.ndim - 1)) for t in tensors]
    return list(torch._foreach_mul(tensors, value))


def arranged(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a stack in the memory order of another, because adding stacks of different orders is slow. The
    gradients of stacked linear layers are transposed; in those of convolutions, the input channels are
    innermost."""
    if tensor.stride() == like.stride() or not len(like) or like.stride(0) != like[0].numel():
        return tensor
    return torch.empty_strided(tensor.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
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
