"""A stack of clients that performs a task: all clients of a simulated round, or the one client of a Flower
node (a stack of one).

A call is one experiment's request to some of its clients. The clients of all calls are stacked: their data,
models and numbers become tensors with one row per client, and the client half of the first call's method
works on all rows (engine/client_task.py says what it does)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks.own_training import OwnTraining
from holdfast.core.device import deterministic_math, to_device
from holdfast.core.keys import Key
from holdfast.core.types import TESTS, Exchange, State
from holdfast.data.federation import Padded
from holdfast.engine.client_task import EVALUATE, Task, perform, personal_models
from holdfast.engine.host_threads import joined
from holdfast.engine.own_training import perform_work
from holdfast.engine.run_context import Call, join
from holdfast.local.client import Local, Received
from holdfast.local.fit import Recipe
from holdfast.local.per_client import Settings, handed
from holdfast.local.plan import Plan
from holdfast.local.programs import with_room

PASSES = "privacy/passes"
"""Under DP-SGD, a field beside those of the schema, which is not sent: passes over the data and steps."""
TaskResult = tuple[State | None, Mapping[str, Tensor]]
"""New private rows of a stack (None: nothing changes), and the fields to send."""


@dataclass
class ClientStack:
    """Performs tasks on stacks of clients. It reads and writes no file: the caller reads and keeps private
    rows."""

    plans: Mapping[str, Plan]
    """How stacks are trained, by the experiments' plan keys."""
    device: torch.device = torch.device("cpu")
    _first: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)
    """First models by address: the host's, which keeps the address its own, and the device's."""

    def perform(self, calls: list[Call], known: Tensor, stored: State) -> TaskResult:
        """Perform the calls' task on all of their clients. `known` says which clients have private rows, and
        `stored` holds those rows."""
        first, exchange = calls[0].run_context, calls[0].exchange
        local = self.local(calls)
        task = self._task(calls, local, known, stored)
        if calls[0].work:
            return None, self._worked(calls, local, task)
        with deterministic_math(self.device, local.plan.precision):
            # programs of other networks may hold what is missing; nothing was changed by then
            state, fields = with_room(lambda: perform(first.rule, local, task))
        if local.passes is not None and exchange.task not in (EVALUATE, *TESTS):
            fields = {**fields, PASSES: local.passes}
        return None if exchange.discard_state else state, fields

    def _worked(self, calls: list[Call], local: Local, task: Task) -> Mapping[str, Tensor]:
        """What attackers find in a piece of work of their own."""
        context, work = calls[0].run_context, calls[0].work
        attack = context.adversary.attack
        assert isinstance(attack, OwnTraining)
        clean = joined_table([c.run_context.clean(c.exchange.to) for c in calls], self.device)
        with deterministic_math(self.device, local.plan.precision):
            return with_room(lambda: perform_work(attack, work, context.rule, local, task, clean))

    def models(self, call: Call, kind: str, known: Tensor, stored: State) -> Tensor:
        """[n, size]: the models that these clients use now, given what they are sent: their personal ones, or
        those they were sent."""
        local = self.local([call])
        received = self._received([call], local)
        if kind != "personal":
            return received.into(local.initial)
        extra, rows = self._on_device(call.exchange.extra), self._on_device(stored)
        task = Task(call.exchange.task, received, extra, known, rows, measure=call.run_context.measure)
        return personal_models(call.run_context.rule, local, task)

    def local(self, calls: list[Call]) -> Local:
        """The joint world of the calls' clients. Every number becomes one value per client."""
        first, sizes = calls[0].run_context, [len(call.exchange.to) for call in calls]
        contexts = [call.run_context for call in calls]
        keys = [client_key(c.run_context.key, c.run_context.round, c.exchange).bits for c in calls]
        rows = [context.method.row_settings() for context in contexts]
        settings = {
            name: _spread(sizes, [row[name] for row in rows]).to(first.network.dtype) for name in rows[0]
        }
        selected = [
            call.exchange.extra.get("selected", torch.ones(n, dtype=torch.bool))
            for call, n in zip(calls, sizes, strict=True)
        ]
        facts = {
            name: torch.cat([call.run_context.fact(name, call.exchange.to) for call in calls])
            for name in sorted(first.rule.knows)
        }
        return Local(
            network=first.network,
            wire=first.wire(),
            ids=torch.cat([call.exchange.to for call in calls]),
            key=Key(torch.cat(keys)),
            samples=first.federation.samples.on(self.device),
            data=joined_table([c.run_context.data(c.exchange.to) for c in calls], self.device),
            validation=joined_table([c.run_context.validation(c.exchange.to) for c in calls], self.device),
            initial=self._initial([context.initial for context in contexts], sizes),
            recipe=_recipe(calls, sizes),
            plan=self.plans[first.plan_key],
            settings=Settings(**handed("settings", settings, self._to_device)),
            selected=torch.cat(selected),
            round=first.round,
            passes=None if first.recipe.sample_clip is None else torch.zeros(sum(sizes), 2).long(),
            facts=self._on_device(facts),
        )

    def _task(self, calls: list[Call], local: Local, known: Tensor, stored: State) -> Task:
        """The request itself, with the test samples where it is an evaluation."""
        first, name = calls[0].run_context, calls[0].exchange.task
        extra = {
            key: self._to_device(torch.cat([call.exchange.extra[key] for call in calls]))
            for key in calls[0].exchange.extra
        }
        test: Padded | None = None
        triggered: tuple[Padded, ...] = ()
        moving = first.adversary.moving
        if name == EVALUATE:
            test = joined_table([c.run_context.test(c.exchange.to) for c in calls], self.device)
        if name == EVALUATE and first.measure.trigger:
            each = zip(*(c.run_context.triggered(c.exchange.to) for c in calls), strict=True)
            triggered = tuple(joined_table(list(tables), self.device) for tables in each)
        return Task(
            name,
            self._received(calls, local),
            extra,
            known,
            self._on_device(stored),
            test,
            first.measure,
            triggered,
            moving.stamp if triggered and moving is not None else None,
        )

    def _received(self, calls: list[Call], local: Local) -> Received:
        """The banks of all calls end to end, and each client's place in them."""
        banks, picks, start = [], [], 0
        for call in calls:
            ex = call.exchange
            banks.append(ex.bank)
            picks.append(torch.where(ex.pick >= 0, ex.pick + start, ex.pick))
            start += ex.bank.shape[0]
        widest = max(pick.shape[1] for pick in picks)
        picks = [torch.nn.functional.pad(pick, (0, widest - pick.shape[1]), value=-1) for pick in picks]
        return Received(joined(banks, self.device), torch.cat(picks), local.wire)

    def _initial(self, models: list[Tensor], sizes: list[int]) -> Tensor:
        """Each client's first model. Every experiment's travels once in a run, and is repeated where it is
        needed."""
        for model in models:
            if id(model) not in self._first:
                self._first[id(model)] = model, self._to_device(model)
        parts = [self._first[id(model)][1].expand(n, -1) for model, n in zip(models, sizes, strict=True)]
        # a single view stays a view: one model for a thousand clients is not copied a thousand times
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _on_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._to_device(value) for name, value in tensors.items()}

    def _to_device(self, value: Tensor) -> Tensor:
        return to_device(value, self.device)


def joined_table(parts: list[Padded], device: torch.device) -> Padded:
    """Padded tables of several groups of clients as one, on a device."""
    whole = join(parts)
    return Padded(to_device(whole.rows, device), to_device(whole.labels, device), whole.count)


def client_key(key: Key, round: int, exchange: Exchange) -> Key:
    """One key per client: the same in a fused cohort, in a run alone, and on the client's own machine."""
    return key.fold("client", round, exchange.step).fold(exchange.to)


def _recipe(calls: list[Call], sizes: list[int]) -> Recipe:
    """The first call's recipe with every number as one value per client."""
    contexts = [call.run_context for call in calls]
    first = contexts[0].recipe
    steps = None
    if first.steps is not None:
        steps = _spread(sizes, [float(context.recipe.steps or 0) for context in contexts]).long()
    numbers: dict[str, Any] = dict(
        lr=_spread(sizes, [context.lr() for context in contexts]),
        epochs=_spread(sizes, [float(context.recipe.epochs) for context in contexts]).long(),
        steps=steps,
        momentum=_spread(sizes, [float(context.recipe.momentum) for context in contexts]),
        weight_decay=_spread(sizes, [float(context.recipe.weight_decay) for context in contexts]),
        clip_gradient=(
            None
            if first.clip_gradient is None
            else _spread(sizes, [float(context.recipe.clip_gradient or 0.0) for context in contexts])
        ),
    )
    made = replace(first, schedule=contexts[0].step_factors(), **handed("recipe", numbers))
    return made if first.sample_clip is None else _private(calls, made)


def _private(calls: list[Call], recipe: Recipe) -> Recipe:
    """The same recipe with the settings of DP-SGD. The server's own pseudo-client and malicious clients
    neither clip nor add noise."""
    clips, noises = [], []
    for call in calls:
        context, ids = call.run_context, call.exchange.to
        honest = call.exchange.is_client & ~torch.isin(ids, context.adversary.at(context.round))
        clips.append(torch.where(honest, float(context.recipe.sample_clip or 0.0), math.inf).double())
        noises.append(torch.where(honest, float(context.recipe.sample_noise), 0.0).double())
    clip, noise, secret = torch.cat(clips), torch.cat(noises), None
    if calls[0].run_context.secret_noise:
        secret = torch.frombuffer(bytearray(os.urandom(8 * len(clip))), dtype=torch.int64)
    return replace(recipe, sample_clip=clip, sample_noise=noise, noise_key=secret)


def _spread(sizes: list[int], values: list[float]) -> Tensor:
    """One value per call as one value per client."""
    return torch.cat([torch.full((n,), v, dtype=torch.float64) for n, v in zip(sizes, values, strict=True)])
