"""RMSprop."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.core.registry import register, setting
from holdfast.local.optimizers.base import Buffers, Optimizer
from holdfast.local.optimizers.sgd import MOMENTUM
from holdfast.local.row_numbers import PerRow, times

SQUARE, MEAN = "square_avg", "grad_avg"


@register(
    "optimizer",
    "rmsprop",
    paper="Tieleman, Hinton, Lecture 6.5: RMSProp, Neural Networks for Machine Learning 2012",
)
class RMSprop(Optimizer):
    """Steps by the gradient over the root of its mean square.

    The same as torch.optim.RMSprop, with `train.momentum` and `train.weight_decay`."""

    uses = frozenset({"momentum", "weight_decay"})
    alpha: float = setting(0.99, "decay of the mean square", ge=0, lt=1)
    eps: float = setting(1e-8, "added to the root of the mean square", ge=0)
    centered: bool = setting(False, "divide by the standard deviation of the gradient instead")

    def keeps(self, momentum: bool) -> tuple[str, ...]:
        return (SQUARE, *([MEAN] if self.centered else []), *([MOMENTUM] if momentum else []))

    def direction(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: Buffers,
        count: Tensor | None,
        momentum: PerRow,
    ) -> list[Tensor]:
        square = state[SQUARE]
        torch._foreach_mul_(square, self.alpha)
        torch._foreach_addcmul_(square, grads, grads, value=1 - self.alpha)
        below = square
        if self.centered:
            mean = state[MEAN]
            torch._foreach_lerp_(mean, grads, 1 - self.alpha)
            below = list(torch._foreach_addcmul(square, mean, mean, value=-1.0))
        below = list(torch._foreach_sqrt(below))
        torch._foreach_add_(below, self.eps)
        step = list(torch._foreach_div(grads, below))
        if MOMENTUM not in state:
            return step
        buffers = state[MOMENTUM]
        for buffer, scaled, one in zip(buffers, times(buffers, momentum), step, strict=True):
            buffer.copy_(scaled + one)
        return buffers
