"""Adam with decoupled weight decay."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from holdfast.core.registry import register, setting
from holdfast.local.optimizers.adam import Adam
from holdfast.local.optimizers.base import Buffers
from holdfast.local.row_numbers import PerRow, is_zero, plus, times


@register("optimizer", "adamw", paper="Loshchilov, Hutter, Decoupled Weight Decay Regularization, ICLR 2019")
class AdamW(Adam):
    """Adam that decays the weights beside the step, not through the gradient.

    The same as torch.optim.AdamW. Its decay is its own setting, with PyTorch's default; `train.weight_decay`,
    which is added to the gradient, must be 0."""

    uses: ClassVar[frozenset[str]] = frozenset()
    instead = {"momentum": "optimizer.betas", "weight_decay": "optimizer.weight_decay"}
    weight_decay: float = setting(
        0.01, "share of the weights, times the learning rate, that a step removes", ge=0
    )

    def direction(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: Buffers,
        count: Tensor | None,
        momentum: PerRow,
    ) -> list[Tensor]:
        step = super().direction(params, grads, state, count, momentum)
        return step if is_zero(self.weight_decay) else plus(step, times(params, self.weight_decay))
