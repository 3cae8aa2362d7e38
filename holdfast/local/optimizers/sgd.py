"""Stochastic gradient descent."""

from __future__ import annotations

from torch import Tensor

from holdfast.core.registry import register, setting
from holdfast.local.optimizers.base import Buffers, Optimizer
from holdfast.local.row_numbers import PerRow, plus, times

MOMENTUM = "momentum_buffer"


@register("optimizer", "sgd")
class Sgd(Optimizer):
    """Stochastic gradient descent, with `train.momentum` and `train.weight_decay`.

    The same as torch.optim.SGD."""

    uses = frozenset({"momentum", "weight_decay"})
    nesterov: bool = setting(False, "Nesterov's momentum; needs train.momentum")

    def keeps(self, momentum: bool) -> tuple[str, ...]:
        return (MOMENTUM,) if momentum else ()

    def direction(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: Buffers,
        count: Tensor | None,
        momentum: PerRow,
    ) -> list[Tensor]:
        if MOMENTUM not in state:
            return grads
        buffers = state[MOMENTUM]
        for buffer, scaled, grad in zip(buffers, times(buffers, momentum), grads, strict=True):
            buffer.copy_(scaled + grad)
        return plus(grads, times(buffers, momentum)) if self.nesterov else buffers
