"""One update of a stack of parameters: clipping, weight decay, pull to a target, and the optimiser's step.
Each setting is one number, or one number per row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.local.optimizers.base import Optimizer
from holdfast.local.row_numbers import PerRow, arranged, is_zero, plus, row_norms, times

_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass
class Update:
    """An optimiser with its numbers and its state, for lists of [m, ...] tensors, which it changes in place.
    `state`, `targets` and `masks` hold lists of the same form; `count` is the number of steps taken [m]."""

    rule: Optimizer
    lr: PerRow
    momentum: PerRow = 0.0
    weight_decay: PerRow = 0.0
    pull: PerRow = 0.0
    clip: PerRow | None = None
    state: dict[str, list[Tensor]] = field(default_factory=dict)
    count: Tensor | None = None
    targets: list[Tensor] | None = None
    masks: list[Tensor] | None = None
    alone: bool = False
    """Whether the tensors belong to one row and have no leading axis."""
    live: dict[str, Any] = field(default_factory=dict)
    """What an optimiser that keeps its state itself keeps, for these rows."""

    def rows(self, part: slice | int) -> Update:
        """Return the same update for some rows; an int selects a single client, without the leading axis."""

        def cut(value: PerRow) -> PerRow:
            if not isinstance(value, Tensor):
                return value
            return float(value[part]) if isinstance(part, int) else value[part]

        def cut_all(values: list[Tensor] | None) -> list[Tensor] | None:
            return None if values is None else [v[part] for v in values]

        return replace(
            self,
            lr=cut(self.lr),
            momentum=cut(self.momentum),
            weight_decay=cut(self.weight_decay),
            pull=cut(self.pull),
            clip=None if self.clip is None else cut(self.clip),
            state={name: [v[part] for v in values] for name, values in self.state.items()},
            count=None if self.count is None else self.count[part],
            targets=cut_all(self.targets),
            masks=cut_all(self.masks),
            alone=isinstance(part, int),
            live={} if isinstance(part, int) else self.live,
        )

    def scaled(self, factor: PerRow) -> Update:
        """Return the same update with another learning rate: this factor times it."""
        return replace(self, lr=self.lr * factor)

    def arranged(self, grads: list[Tensor]) -> Update:
        """Return the same update with its tensors in the memory order of these gradients."""

        def all_arranged(values: list[Tensor] | None) -> list[Tensor] | None:
            return None if values is None else [arranged(v, g) for v, g in zip(values, grads, strict=True)]

        return replace(
            self,
            state={name: all_arranged(values) or [] for name, values in self.state.items()},
            targets=all_arranged(self.targets),
            masks=all_arranged(self.masks),
        )

    def apply(self, params: list[Tensor], grads: list[Tensor]) -> None:
        if not params:
            return
        if self.clip is None:
            grads = self._pulled(params, self._decayed(params, grads))
        else:  # the pull is a part of the loss, weight decay one of the optimiser
            grads = self._decayed(params, self._clipped(self._pulled(params, grads)))
        if self.count is not None:
            self.count.add_(1)
        self.rule.move(self, params, grads)

    def _decayed(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        return grads if is_zero(self.weight_decay) else plus(grads, times(params, self.weight_decay))

    def _pulled(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        if self.targets is None or is_zero(self.pull):
            return grads
        away = list(torch._foreach_sub(params, self.targets))
        return plus(grads, times(away, self.pull))

    def _clipped(self, grads: list[Tensor]) -> list[Tensor]:
        """Shorten the gradient of each row to the norm `clip`, where it is longer. Masked entries do not
        count."""
        assert self.clip is not None
        if self.masks is not None:
            grads = [
                torch.where(mask, grad, torch.zeros_like(grad))
                for mask, grad in zip(self.masks, grads, strict=True)
            ]
        return times(grads, (self.clip / (row_norms(grads, self.alone) + _CLIP_EPS)).clamp(max=1.0))
