"""Evaluation after a round: what the clients' models would score now. It counts no traffic and keeps no
state."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.core.generators import Steps, pass_on, relay
from holdfast.core.together import Computation
from holdfast.core.types import Exchange, State
from holdfast.engine.client_task import EVALUATE, sends_global_first
from holdfast.evaluation import metrics
from holdfast.experiment.meter import Meter
from holdfast.methods.context import Context, Timer

if TYPE_CHECKING:
    from holdfast.experiment.loop import Experiment


def evaluate_round(
    experiment: Experiment, state: State, ctx: Context, last: bool = False
) -> Generator[Exchange | Computation, Any, tuple[metrics.Figures, State]]:
    """Measure the models that the clients would use now. Returns the round's figures and arrays; both are
    empty in a round that is not evaluated."""
    round, meter = experiment.run_context.round, experiment.meter
    if not last and round % experiment.config.evaluate.every and round != experiment.rounds:
        return {}, {}
    started = time.perf_counter()
    held_out = torch.tensor(experiment.federation.held_out, dtype=torch.int64)
    measured = _measured_clients(experiment, ctx, held_out)
    ids = torch.cat([measured, held_out]).unique()
    delivery = experiment.server.deliver(state, replace(ctx, timer=Timer()), ids)
    sent = yield from discarding_state(delivery, meter, experiment.privacy.ask)
    bank, pick = _with_global_first(experiment, state, sent)
    selected = torch.isin(ids, meter.took_part())
    up = yield Exchange(
        EVALUATE, ids, bank, pick, {**sent.extra, "selected": selected}, step=meter.next_step()
    )
    meter.refused.update(up.refused)
    selected = selected[torch.isin(ids, up.ids)]  # real clients may be missing
    of_measured, of_late = torch.isin(up.ids, measured), torch.isin(up.ids, held_out)
    method, models = experiment.method, experiment.models
    figures = metrics.of_round(
        up.fields,
        experiment.adversary.benign(up.ids, round) & of_measured,
        models,
        method.deploys,
        experiment.metrics,
        has=method.models,
    )
    figures |= metrics.of_late(up.fields, of_late, models, method.deploys)
    meter.seconds["evaluate"] += time.perf_counter() - started
    arrays = {"ids": up.ids, "selected": selected, **up.fields}
    groups = {"evaluate": of_measured, **({"late": of_late} if len(held_out) else {})}
    return figures, {
        f"{group}/{name}": value[rows] for group, rows in groups.items() for name, value in arrays.items()
    }


def discarding_state(steps: Steps, meter: Meter, ask: Callable[[Exchange], Steps] = pass_on) -> Steps:
    """Pass on what evaluation asks of clients: numbered after the round's own exchanges, and the clients keep
    no state of it."""

    def unkept(asked: Exchange | Computation) -> Steps:
        if isinstance(asked, Computation):
            return pass_on(asked)
        return ask(replace(asked, step=meter.next_step(), discard_state=True))

    return (yield from relay(steps, unkept))


def _measured_clients(experiment: Experiment, ctx: Context, held_out: Tensor) -> Tensor:
    """The clients that are evaluated. A banned client still uses a model and stays in the mean."""
    which, members = experiment.config.evaluate.clients, experiment.participation.clients
    if which == "cohort":
        return ctx.cohort
    if which == "held-out":
        return held_out
    if which == "benign":
        return members[experiment.adversary.benign(members, experiment.run_context.round)]
    return members


def _with_global_first(experiment: Experiment, state: State, sent: Exchange) -> tuple[Tensor, Tensor]:
    """The bank and picks of an evaluation: the models that are delivered and, for a method with global and
    customised models, the global one in front of each client's own."""
    if not sends_global_first(experiment.rule):
        return sent.bank, sent.pick
    shared = experiment.server.global_model(state)
    assert shared is not None, f"{experiment.method.name} has global models but its server half names none"
    first = torch.full((len(sent.to), 1), len(sent.bank), dtype=torch.int64)
    return torch.cat([sent.bank, shared[None]]), torch.cat([first, sent.pick], dim=1)
