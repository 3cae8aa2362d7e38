"""A trigger that attackers train, so that it is another one in every round.

The trigger of a fixed backdoor is stamped into the sample store once (`Attack.planted`). One that is trained
lives in the attackers' memory (memory.py): they stamp it into their batches while they train
(own_training.py), and `attack/asr` is measured with what they remember after the round. Test samples wait
unstamped, and each client's models see them through `stamp`.

An attack declares it by `Attack.moving`, and remembers its tensors under the names in `start`. Its attackers
share one trigger, so it needs `least = "colluders"`: memory of attackers that know only themselves is not
shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from holdfast.attacks.memory import Memories
from holdfast.attacks.triggered import Triggered, shown
from holdfast.core.types import State
from holdfast.data.client_rows import ClientRows

Answers = Callable[[Tensor], Tensor]
"""The logits of one client's model for samples [B, ...]."""
Stamp = Callable[[Answers, Tensor, Mapping[str, Tensor]], Tensor]
PREFIX = "attack/"
"""Before the names of a trigger's tensors, where they travel beside those of the method."""


class MovingTrigger(NamedTuple):
    """What makes a poisoned model answer `target`."""

    stamp: Stamp
    """stamp(answers, x, own): puts the trigger into the samples x [B, ...] of one client, as the network
    reads them; `own` are the tensors of `start` as they are now. A trigger that depends on the model
    (Bad-PFL) asks it by `answers`, with torch.func for gradients. It must be a function of its arguments
    alone."""
    start: Mapping[str, Tensor]
    """The trigger's tensors before any attacker has trained them."""
    target: int
    inclusive: bool = False
    """Whether samples that show the target anyway count as successes."""

    def now(self, memories: Memories) -> State:
        """The tensors as attackers remember them."""
        known = memories.of("all")
        found = {name: known.recall(name) for name in self.start}
        return {name: self.start[name] if value is None else value for name, value in found.items()}


def waiting_for(trigger: MovingTrigger, test: ClientRows) -> Triggered:
    """The test samples that are shown with the trigger, labelled as its target."""
    return shown(test, trigger.target, trigger.inclusive)


def stamping(
    predict: Callable[..., Tensor], stamp: Stamp
) -> Callable[[object, Tensor, Mapping[str, Tensor]], Tensor]:
    """The prediction of a method for samples with the trigger, whose tensors come among those of `aux`."""

    def predicted(net: object, x: Tensor, aux: Mapping[str, Tensor]) -> Tensor:
        own = {name.removeprefix(PREFIX): v for name, v in aux.items() if name.startswith(PREFIX)}
        rest = {name: v for name, v in aux.items() if not name.startswith(PREFIX)}
        return predict(net, stamp(lambda samples: predict(net, samples, rest), x, own), rest)

    return predicted
