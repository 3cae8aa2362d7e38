"""What a client's optimiser is: a part that turns the gradients of a stack into directions, and says what it
keeps for each row from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from holdfast.core.registry import Part, setting
from holdfast.local.row_numbers import PerRow, times

if TYPE_CHECKING:
    from holdfast.local.update import Update

Buffers = Mapping[str, list[Tensor]]
"""What an optimiser keeps, by name: one tensor for each parameter, of its form."""


class Optimizer(Part):
    """An optimiser of the clients.

    The learning rate is `train.lr`. An optimiser declares which other numbers of [train] it uses; a number
    that it does not use must be left out. Its own settings are equal for all rows of a stack: experiments
    that differ in them are trained apart.

        @register("optimizer", "sign")
        class Sign(Optimizer):
            '''Steps of equal length in every coordinate.'''

            def direction(self, params, grads, state, count, momentum):
                return [grad.sign() for grad in grads]
    """

    uses: ClassVar[frozenset[str]] = frozenset()
    """Numbers of [train] that it uses, beside the learning rate: momentum, and weight_decay where that is
    added to the gradient."""
    instead: ClassVar[Mapping[str, str]] = {}
    """Its own setting to set, in place of a number of [train] that it does not use."""
    counts: ClassVar[bool] = False
    """Whether it needs the number of the step."""
    by_row: ClassVar[bool] = True
    """Whether every row has its own learning rate and its own state."""
    persist: bool = setting(
        False, "keep the state of each client from round to round; false: every round starts afresh"
    )

    def keeps(self, momentum: bool) -> tuple[str, ...]:
        """Names of the tensors that it keeps for every parameter; `momentum` says whether any row has
        some."""
        return ()

    def held(self) -> int:
        """Return how many tensors of the size of the model it holds for a row: for the forecast of memory."""
        return len(self.keeps(True)) * (3 if self.persist else 1)  # as read, in training, and to be written

    def direction(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: Buffers,
        count: Tensor | None,
        momentum: PerRow,
    ) -> list[Tensor]:
        """Return the tensors that, times the learning rate, are subtracted from the parameters. `state` is
        changed in place; `count` is the number of this step, from 1, for each row."""
        raise TypeError(f"{type(self).__name__} does not define a direction")

    def move(self, update: Update, params: list[Tensor], grads: list[Tensor]) -> None:
        """Change the parameters in place."""
        step = self.direction(params, grads, update.state, update.count, update.momentum)
        if update.masks is not None:
            # `where`, not a product with 0: a masked entry stays even when its gradient is not finite
            step = [
                torch.where(mask, one, torch.zeros_like(one))
                for mask, one in zip(update.masks, step, strict=True)
            ]
        if isinstance(update.lr, Tensor):
            torch._foreach_sub_(params, times(step, update.lr))
        else:
            torch._foreach_add_(params, step, alpha=-update.lr)
