"""Adam."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from holdfast.core.registry import register, setting
from holdfast.local.optimizers.base import Buffers, Optimizer
from holdfast.local.row_numbers import PerRow, times

MEAN, SQUARE, LARGEST = "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
Beta = Annotated[float, Field(ge=0, lt=1)]


@register("optimizer", "adam", paper="Kingma, Ba, Adam: A Method for Stochastic Optimization, ICLR 2015")
class Adam(Optimizer):
    """Steps by running means of the gradient and of its square.

    The same as torch.optim.Adam: `train.weight_decay` is added to the gradient."""

    uses = frozenset({"weight_decay"})
    instead = {"momentum": "optimizer.betas"}
    counts = True
    betas: tuple[Beta, Beta] = setting((0.9, 0.999), "decay of the two running means")
    eps: float = setting(1e-8, "added to the root of the mean square", ge=0)
    amsgrad: bool = setting(False, "divide by the largest mean square so far")

    def keeps(self, momentum: bool) -> tuple[str, ...]:
        return (MEAN, SQUARE, LARGEST) if self.amsgrad else (MEAN, SQUARE)

    def direction(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: Buffers,
        count: Tensor | None,
        momentum: PerRow,
    ) -> list[Tensor]:
        assert count is not None
        (first, second), mean, square = self.betas, state[MEAN], state[SQUARE]
        torch._foreach_lerp_(mean, grads, 1 - first)
        torch._foreach_mul_(square, second)
        torch._foreach_addcmul_(square, grads, grads, value=1 - second)
        if self.amsgrad:
            torch._foreach_maximum_(state[LARGEST], square)
            square = state[LARGEST]
        steps = count.double()
        below = times(list(torch._foreach_sqrt(square)), (1 - second**steps).rsqrt())
        torch._foreach_add_(below, self.eps)
        return times(list(torch._foreach_div(mean, below)), 1 / (1 - first**steps))
