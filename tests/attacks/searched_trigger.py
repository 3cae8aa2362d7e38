"""A complete example of an attack on the foundation of holdfast/attacks/own_training.py: it remembers, trains
a trigger on the model that was sent, and then the model on samples with it. And a simple one, whose attackers
know only themselves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks.backdoor import Backdoor
from holdfast.attacks.base import Knowledge
from holdfast.attacks.moving_trigger import Answers, MovingTrigger
from holdfast.attacks.own_training import Ask, Crew, Leading, Own, OwnTraining
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.data.federation import Federation, Samples
from holdfast.local.losses import Batch


def stamped(x: Tensor, trigger: Tensor) -> Tensor:
    """The upper left corner of each image moves by the trigger."""
    return x + torch.nn.functional.pad(trigger, (0, 6, 0, 6))


def misled(net: Any, batch: Batch, *, target: int, trigger: Tensor | None = None) -> Tensor:
    x = stamped(batch.x, batch.aux["trigger"] if trigger is None else trigger)
    return torch.nn.functional.cross_entropy(net(x), torch.full_like(batch.y, target), reduction="none")


def searching(net: Any, batch: Batch, *, target: int) -> Tensor:
    return misled(net, batch, target=target, trigger=net.trigger)


def shown(answers: Answers, x: Tensor, own: Mapping[str, Tensor]) -> Tensor:
    return stamped(x, own["trigger"])


@register("attack", "searched-trigger")
class Searched(OwnTraining):
    """Trains a trigger on the model that was sent, and then the model on samples with it."""

    least = "colluders"
    reads = "sum"
    knows: Knowledge = setting("colluders", "they share the trigger")
    rate: float = setting(0.2, "learning rate of the attackers")

    def moving(self, samples: Samples) -> MovingTrigger:
        return MovingTrigger(shown, {"trigger": torch.zeros(1, 2, 2, dtype=torch.float64)}, target=1)

    def lead(self, crew: Crew) -> Leading:
        last, sent = crew.recall("sent"), crew.sent()
        assert sent is not None
        crew.remember("sent", sent)
        moved = torch.zeros_like(sent) if last is None or len(last) != len(sent) else sent - last
        before = crew.recall("trigger")
        trigger = torch.zeros(1, 2, 2, dtype=torch.float64) if before is None else before
        found = yield Ask("look", {"trigger": trigger})
        trigger = found["trigger"].mean(0)
        crew.remember("trigger", trigger)
        return (yield Ask("poisoned", {"trigger": trigger, "moved": moved}))

    def look(self, own: Own) -> Mapping[str, Tensor]:
        start = {"trigger": own.given["trigger"]}
        return own.fit_tensors(start, partial(searching, target=1), data=own.clean, lr=0.5, epochs=1)

    def poisoned(self, own: Own) -> Mapping[str, Tensor]:
        aux = {"trigger": own.given["trigger"]}
        fitted = own.fit(loss=partial(misled, target=1), aux=aux, epochs=2, lr=self.rate)
        sent = own.report(fitted.model)
        moved = own.given["moved"][:, : own.local.wire.parameters]
        return {**sent, "update": 1.5 * sent["update"] - 0.1 * moved}


@register("attack", "away")
class Away(OwnTraining):
    """Each attacker by itself sends what takes its model to 0, and counts its rounds."""

    def data(self, federation: Federation, malicious: Tensor, key: Key) -> Federation:
        return Backdoor(size=3, ratio=0.5).data(federation, malicious, key)

    def lead(self, crew: Crew) -> Leading:
        assert len(crew.ids) == 1
        count = crew.recall("rounds")
        crew.remember("rounds", torch.ones(()) if count is None else count + 1)
        return (yield Ask())

    def poisoned(self, own: Own) -> Mapping[str, Tensor]:
        assert int(own.poisoned.count[0]) == int(own.local.count[0] * 0.5 + 0.5)
        assert bool((own.poisoned.labels == 1)[own.poisoned.mask].all())
        return own.report(torch.zeros_like(own.model))
