"""What one task does: training, evaluation or scoring of a stack of clients whose world is already put
together (engine/client_stack.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks.moving_trigger import PREFIX, Stamp, stamping
from holdfast.core.errors import RunError
from holdfast.core.flat import Wire
from holdfast.core.types import ASSESS, SCORE, Exchange, Field, Schema, State
from holdfast.core.types import EVALUATE as EVALUATE
from holdfast.data.client_rows import Padded, either
from holdfast.engine.run_context import Measure
from holdfast.evaluation.evaluate import Predict, score
from holdfast.evaluation.scores import UNDEFINED, Score
from holdfast.local.client import Local, Received, rows_of, stack_states
from holdfast.local.optimizer_memory import OptimizerMemory, apart
from holdfast.local.per_client import plain, rows_of_number
from holdfast.methods.base import ClientRule


@dataclass(frozen=True)
class Task:
    """What a stack of clients is asked to do. `stored` is the private state of the clients in `known`, row
    after row."""

    name: str
    received: Received
    extra: Mapping[str, Tensor]
    known: Tensor
    stored: State
    test: Padded | None = None
    measure: Measure | None = None
    triggered: tuple[Padded, ...] = ()
    """Test samples with an attack's trigger, as `RunContext.triggered` gives them."""
    stamp: Stamp | None = None
    """Puts the trigger into those samples while they are shown, where it changes from round to round."""


def perform(rule: ClientRule, local: Local, task: Task) -> tuple[State | None, Mapping[str, Tensor]]:
    """Perform a task. Returns the new private rows (None: nothing changes) and the fields to send."""
    known, (_, kept) = task.known, apart(task.stored)
    task = _without_optimisers(task)
    state = _state(rule, local, task)
    if task.name == EVALUATE:
        return None, _measure(rule, local, state, task)
    if task.name == SCORE:
        return None, {"score": _scored(rule, local, state, task.received)}
    if task.name == ASSESS:
        return None, _assessed(rule, local, state, task.received)
    if task.name not in rule.tasks:
        raise RunError(
            f"{rule.method.name} has no client task '{task.name}'; it has {', '.join(sorted(rule.tasks))}"
        )
    memory = OptimizerMemory.of(
        task.name,
        rule.trainings(),
        local.network,
        local.recipe,
        local.ids,
        known,
        kept,
        local.initial.device,
    )
    state, fields = getattr(rule, task.name)(replace(local, memory=memory), state, task.received, task.extra)
    if state is None:
        return None, _plain(fields)
    return {**_plain(state), **({} if memory is None else memory.rows)}, _plain(fields)


def state_of(rule: ClientRule, local: Local, task: Task) -> State:
    """The private rows with which these clients begin."""
    return _state(rule, local, _without_optimisers(task))


def _without_optimisers(task: Task) -> Task:
    """The same task with the private rows of the method alone. A client that has only an optimiser's state
    has none of the method's."""
    own, kept = apart(task.stored)
    if not kept:
        return task
    return replace(task, stored=own, known=task.known if own else torch.zeros_like(task.known))


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a client half returns, with settings as ordinary tensors."""
    return {name: plain(value) for name, value in tensors.items()}


def schema_of(rule: ClientRule, exchange: Exchange, wire: Wire, measure: Measure) -> Schema:
    task = exchange.task
    if task == SCORE:
        return {"score": Field("score", (exchange.pick.shape[1],), low=UNDEFINED, high=1)}
    if task == ASSESS:
        shape = (exchange.pick.shape[1],)
        loss, error = (Field("score", shape, 0, high, torch.float64) for high in (None, 1))
        return {"assess/loss": loss, "assess/error": error}
    if task != EVALUATE:
        return rule.schema(task, wire)
    splits = ["test", *(["validation"] if measure.validation else [])]
    count, loss = Field("count", low=0, dtype=torch.float64), Field("score", dtype=torch.float64)
    asked = Field("score", low=UNDEFINED, high=1, dtype=torch.float64)
    fields = {f"{split}/total": count for split in splits}
    for split in splits:
        for model in measure.models:
            fields |= {f"{split}/{model}/correct": count, f"{split}/{model}/loss": loss}
            fields |= {f"{split}/{model}/{metric}": asked for metric in measure.metrics}
    names = ("total", *(f"{model}/correct" for model in measure.models))
    for prefix in _triggered(measure):
        fields |= {f"{prefix}/{name}": count for name in names}
    return fields


def _triggered(measure: Measure) -> tuple[str, ...]:
    """Names of what is counted on triggered samples: all that the attack counts, and of these the ones that
    show the target anyway."""
    return ("triggered", "triggered/of_target")[: measure.trigger + measure.of_target]


def _state(rule: ClientRule, local: Local, task: Task) -> State:
    """Stored rows where there are any, fresh ones for clients seen for the first time."""
    if bool(task.known.all()):
        return task.stored
    fresh = _plain(rule.init(pick(local, ~task.known)))
    if not bool(task.known.any()):
        return fresh
    if fresh.keys() != task.stored.keys():
        raise RunError(
            f"{rule.method.name}: init gives the private state {sorted(fresh)}, but training left"
            f" {sorted(task.stored)}"
        )
    order = torch.argsort(torch.cat([task.known.nonzero().flatten(), (~task.known).nonzero().flatten()]))
    return rows_of(stack_states([task.stored, fresh]), order)


def _measure(rule: ClientRule, local: Local, state: State, task: Task) -> Mapping[str, Tensor]:
    """Count right answers, losses and other metrics asked for, of each of the client's models. Trains at most
    a copy; writes nothing."""
    measure, received = task.measure, task.received
    assert measure is not None and task.test is not None
    shared = received
    if sends_global_first(rule):
        received = replace(received, pick=received.pick[:, 1:])
    data = {"test": task.test, **({"validation": local.validation} if measure.validation else {})}
    out: dict[str, Tensor] = {}
    for model in measure.models:
        if model == "personal":
            bank, which = (
                _personal(rule, local, state, replace(task, received=received)),
                torch.arange(local.n),
            )
        else:
            bank, which = _sent(local, shared if model == "global" else received)
        aux = _plain(rule.aux(local, state, received))
        for split, table in data.items():
            common = split == "test" and measure.test == "global"
            result = _tested(rule.predict, local, bank, which, table, aux, common, measure.metrics)
            out[f"{split}/{model}/correct"] = result.correct.double()
            out[f"{split}/{model}/loss"] = result.loss
            out |= {f"{split}/{model}/{metric}": value for metric, value in result.more.items()}
            out[f"{split}/total"] = result.total.double()
        predict, shown = _shown(rule, aux, task)
        for prefix, table in zip(_triggered(measure), task.triggered, strict=True):
            result = _tested(predict, local, bank, which, table, shown, measure.test == "global")
            out[f"{prefix}/{model}/correct"] = result.correct.double()
            out[f"{prefix}/total"] = result.total.double()
    return out


def _shown(rule: ClientRule, aux: Mapping[str, Tensor], task: Task) -> tuple[Predict, Mapping[str, Tensor]]:
    """The prediction for samples with the trigger, and what it needs."""
    if task.stamp is None:
        return rule.predict, aux
    trigger = {name: value for name, value in task.extra.items() if name.startswith(PREFIX)}
    return stamping(rule.predict, task.stamp), {**aux, **trigger}


def _tested(
    predict: Predict,
    local: Local,
    bank: Tensor,
    which: Tensor,
    table: Padded,
    aux: Mapping[str, Tensor],
    common: bool,
    metrics: Collection[str] = (),
) -> Score:
    """Test every client's model. Where all are tested on the same samples, a model that several clients
    received is tested once."""
    if not common or aux:
        return score(local.network, predict, bank, which, local.samples, table, local.plan, aux, metrics)
    models, of = which.unique(return_inverse=True)
    first = torch.full_like(models, len(which)).scatter_reduce_(
        0, of, torch.arange(len(which), device=of.device), "amin"
    )
    theirs = Padded(*(part[first.to(part.device)] for part in (table.rows, table.labels, table.count)))
    return score(local.network, predict, bank, models, local.samples, theirs, local.plan, aux, metrics).of(of)


def _scored(rule: ClientRule, local: Local, state: State, received: Received) -> Tensor:
    """[n, models]: the accuracy of each model that a client was sent, on its own validation samples (its
    training samples where it has no others); undefined for one that it was not sent, or where it has no
    samples at all."""
    out = torch.full(received.pick.shape, UNDEFINED, dtype=local.network.dtype)
    for j, (known, found) in enumerate(_tests(rule, local, state, received)):
        out[known, j] = (found.correct[known].double() / found.total[known]).to(out.dtype)
    return out


def _assessed(rule: ClientRule, local: Local, state: State, received: Received) -> dict[str, Tensor]:
    """[n, models] each: the mean loss and the error rate of each model that was sent, on these samples. A
    loss that is not finite is as large as a number can be, and a model that was not sent is wrong
    everywhere."""
    worst = torch.finfo(torch.float64).max
    loss = torch.full(received.pick.shape, worst, dtype=torch.float64)
    error = torch.ones_like(loss)
    for j, (known, found) in enumerate(_tests(rule, local, state, received)):
        total = found.total[known].double()
        mean = found.loss[known].double() / total
        loss[known, j] = mean.nan_to_num(nan=worst, posinf=worst)
        error[known, j] = 1 - found.correct[known].double() / total
    return {"assess/loss": loss, "assess/error": error}


def _tests(
    rule: ClientRule, local: Local, state: State, received: Received
) -> Iterator[tuple[Tensor, Score]]:
    """For each model that clients were sent: which of them know how good theirs is, and their scores. One
    model per client at a time: a committee may be sent a whole cohort."""
    data = (
        local.validation if bool((local.validation.count > 0).all()) else either(local.validation, local.data)
    )
    for j in range(received.pick.shape[1]):
        one = replace(received, pick=received.pick[:, j : j + 1])
        found = score(
            local.network,
            rule.predict,
            rule.committee_model(local, state, one),
            torch.arange(local.n),
            local.samples,
            data,
            local.plan,
            rule.aux(local, state, one),
        )
        yield one.has & (found.total > 0), found


def _sent(local: Local, received: Received) -> tuple[Tensor, Tensor]:
    """The models that were sent, and which of them each client got. Where only a part travels, or nothing,
    the start model fills in."""
    if local.wire.whole and bool(received.has.all()):
        return received.bank, received.pick[:, 0]
    return received.into(local.initial), torch.arange(local.n)


def sends_global_first(rule: ClientRule) -> bool:
    """Whether clients are sent the global model for evaluation too, in front of their own."""
    return {"global", "customised"} <= set(rule.method.models)


def personal_models(rule: ClientRule, local: Local, task: Task) -> Tensor:
    """The personal models themselves, one row for each client."""
    task = _without_optimisers(task)
    return _personal(rule, local, _state(rule, local, task), task)


def _personal(rule: ClientRule, local: Local, state: State, task: Task) -> Tensor:
    """The personal models, with the chosen treatment of clients outside the cohort, and in it. One that never
    trained has only what it is sent."""
    measure, received = task.measure, task.received
    assert measure is not None
    outside = ~local.selected
    if measure.unselected == "finetune" and bool(outside.any()):
        part = pick(local, outside)
        tuned = rule.finetune(part, rows_of(state, outside), replace(received, pick=received.pick[outside]))
        order = torch.argsort(torch.cat([local.selected.nonzero().flatten(), outside.nonzero().flatten()]))
        state = rows_of(stack_states([rows_of(state, local.selected), tuned]), order)
        return rule.personal(replace(local, selected=torch.ones_like(local.selected)), state, received)
    kept = task.known if measure.selected == "keep_own" else outside & task.known
    held = replace(
        received, pick=torch.where(kept[:, None], torch.full_like(received.pick, -1), received.pick)
    )
    own = rule.personal(local, state, held)
    taken = (
        outside & received.has if measure.unselected == "deliver" else outside & received.has & ~task.known
    )
    if not state or not bool(taken.any()):
        return own
    return torch.where(taken.to(own.device)[:, None], rule.handed(local, own, received), own)


def pick(local: Local, rows: Tensor) -> Local:
    """The same world for fewer clients; `rows` is a mask."""
    data, validation = (
        Padded(p.rows[rows], p.labels[rows], p.count[rows]) for p in (local.data, local.validation)
    )
    settings = type(local.settings)(**{k: rows_of_number(v, rows) for k, v in vars(local.settings).items()})
    numbers: dict[str, Any] = {
        k: rows_of_number(v, rows) for k, v in vars(local.recipe).items() if isinstance(v, Tensor)
    }
    recipe = replace(local.recipe, **numbers)
    return replace(
        local,
        ids=local.ids[rows],
        key=local.key[rows],
        initial=local.initial[rows],
        settings=settings,
        recipe=recipe,
        selected=local.selected[rows],
        data=data,
        validation=validation,
        facts=rows_of(dict(local.facts), rows),
        passes=None if local.passes is None else local.passes[rows],
    )
