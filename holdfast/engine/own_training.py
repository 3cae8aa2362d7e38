"""What attackers do before they answer: the training of their own (attacks/own_training.py), and the trigger
with which their success is measured (attacks/moving_trigger.py).

Attackers of all experiments that are asked at once go in lockstep: work for which they ask at the same time
is done as one stack where the experiments train together and their attacks have the same settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.attacks.moving_trigger import PREFIX
from holdfast.attacks.own_training import Ask, Crew, Leading, Own, OwnTraining
from holdfast.core.errors import RunError
from holdfast.core.generators import Finished, advance
from holdfast.core.types import EVALUATE, SCORE, Schema, Uplink
from holdfast.data.client_rows import Padded
from holdfast.engine.client_task import Task, state_of
from holdfast.engine.run_context import Call
from holdfast.local.client import Local
from holdfast.local.per_client import plain
from holdfast.methods.base import ClientRule

Worked = Callable[[list[Call]], list[Uplink]]
"""Performs work of attackers; returns what they found, one row each."""


@dataclass
class _Leader:
    """Attackers that act together, and how far they are."""

    call: Call
    crew: Crew
    steps: Leading
    waiting: Ask | None = None
    found: Uplink | None = None

    def turn(self, found: Uplink | None) -> None:
        request = advance(self.steps, found)
        ended = isinstance(request, Finished)
        self.waiting, self.found = (None, request.value) if ended else (request, None)

    def work(self) -> Call:
        """The request of their leader to them."""
        assert self.waiting is not None
        return replace(self.call, exchange=self.waiting.exchange(self.crew.asked), work=self.waiting.task)


def trained_by_attackers(
    calls: Sequence[Call], schemas: Sequence[Schema], worked: Worked
) -> list[Uplink | None]:
    """What the attackers' own training leaves, by call: None where they have none in it. It is done before
    clients answer honestly, so attackers begin with the private rows that they had."""
    leaders = [_leaders(call, schema) for call, schema in zip(calls, schemas, strict=True)]
    now = [leader for of_call in leaders for leader in of_call]
    answers: Sequence[Uplink | None] = [None] * len(now)
    while now:
        for leader, answer in zip(now, answers, strict=True):
            leader.turn(answer)
        now = [leader for leader in now if leader.waiting is not None]
        answers = worked([leader.work() for leader in now]) if now else []
    for of_call in leaders:
        for leader in of_call:
            if not leader.call.exchange.discard_state:
                leader.call.run_context.adversary.memories.add(leader.crew.owner, leader.crew.memory.fresh)
    return [_joined(of_call) for of_call in leaders]


def _leaders(call: Call, schema: Schema) -> list[_Leader]:
    context, ex = call.run_context, call.exchange
    attack = context.adversary.attack
    if not isinstance(attack, OwnTraining) or ex.task in (EVALUATE, SCORE):
        return []
    key = context.key.fold("attack", context.round, ex.step)
    crews = context.adversary.crews(ex, schema, key, context.round, context.rule.begins_unsent)
    return [_Leader(call, crew, attack.lead(crew)) for crew in crews]


def _joined(leaders: Sequence[_Leader]) -> Uplink | None:
    """What all attackers of a call send, in the order of their ids."""
    found = [leader.found for leader in leaders if leader.found is not None]
    if len(found) < 2:
        return found[0] if found else None
    first = found[0]
    if any(one.fields.keys() != first.fields.keys() for one in found):
        name = leaders[0].crew.attack.name
        raise RunError(f"attack '{name}': its clients send different fields; all must send the same")
    fields = {name: torch.cat([one[name] for one in found]) for name in first.fields}
    return replace(first, ids=torch.cat([one.ids for one in found]), fields=fields)


def perform_work(
    attack: OwnTraining, work: str, rule: ClientRule, local: Local, task: Task, clean: Padded
) -> Mapping[str, Tensor]:
    """Let a stack of attackers do a piece of work. They add no noise for privacy, and keep no optimiser."""
    state = state_of(rule, local, task)
    recipe = replace(local.recipe, sample_clip=None, sample_noise=0.0, noise_key=None)
    local = replace(local, key=local.key.fold("attack", work), recipe=recipe, passes=None, memory=None)
    model, base = rule.as_sent(local, state, task.received)
    found = getattr(attack, work)(Own(local, task.received, model, base, clean, task.extra))
    for name, value in found.items():
        if len(value) != local.n:
            raise RunError(
                f"attack '{attack.name}': {work} returns '{name}' with {len(value)} rows for {local.n}"
                " clients"
            )
    return {name: plain(value) for name, value in found.items()}


def with_trigger(call: Call) -> Call:
    """The same evaluation with what attackers have trained of their trigger, for every client."""
    adversary, ex = call.run_context.adversary, call.exchange
    if adversary.moving is None or ex.task != EVALUATE:
        return call
    now = adversary.moving.now(adversary.memories)
    shown = {f"{PREFIX}{name}": v.expand(len(ex.to), *v.shape) for name, v in now.items()}
    return replace(call, exchange=replace(ex, extra={**ex.extra, **shown}))
