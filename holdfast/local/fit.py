"""The only training loop. It trains a stack of clients, each from its own model on its own batches, with any
loss written for one client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from holdfast.core.device import Precision, to_device
from holdfast.core.keys import Key
from holdfast.core.types import State
from holdfast.data.federation import Padded, Samples
from holdfast.local.batch_order import schedule
from holdfast.local.gradients import Stacked, Step, apply_step, no_luck
from holdfast.local.per_client import plain, training
from holdfast.local.per_sample import single_gradients, stacked_gradients, with_privacy
from holdfast.local.plan import REPLAYED, STACKED, Plan
from holdfast.local.programs import CannotReplay, replay
from holdfast.local.row_numbers import PerRow, arranged
from holdfast.local.stack import Recipe as Recipe
from holdfast.local.stack import Stack
from holdfast.models.network import Network

_NO_KEY = torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True)
class Fitted:
    """The outcome of a training: models [rows, size], mean loss over the steps [rows], steps taken [rows];
    and the optimiser's state where it was given one to start from."""

    model: Tensor
    loss: Tensor
    steps: Tensor
    state: State = field(default_factory=dict)


def fit(
    network: Network,
    model: Tensor,
    samples: Samples,
    data: Padded,
    key: Key,
    recipe: Recipe,
    plan: Plan,
    *,
    pull: tuple[Tensor, PerRow] | None = None,
    trainable: Tensor | None = None,
    aux: Mapping[str, Tensor] | None = None,
    step: Step | None = None,
    state: State | None = None,
) -> Fitted:
    """Train a stack of models [r * n, size] on the data of n clients: row i belongs to client i mod n, and
    all models of a client see the same batches. `pull = (target, lam)` adds lam * (parameters - target) to
    the gradient; `trainable` (bool[size], or one such row per model) says which values change; `aux` holds
    tensors with one row per client (or per model), which the loss finds in `batch.aux`; `state` is the
    optimiser's state to start from, with one row per model."""
    if step is not None and pull is not None:
        raise TypeError("fit: a step function does its own pulling; give `pull` or `step`, not both")
    model = plain(model)
    if not len(model):
        return Fitted(
            model.clone(),
            torch.zeros(0, dtype=torch.float64),
            torch.zeros(0, dtype=torch.int64),
            dict(state or {}),
        )
    with training():
        return _fitted(network, model, samples, data, key, recipe, plan, pull, trainable, aux, step, state)


def _fitted(
    network: Network,
    model: Tensor,
    samples: Samples,
    data: Padded,
    key: Key,
    recipe: Recipe,
    plan: Plan,
    pull: tuple[Tensor, PerRow] | None,
    trainable: Tensor | None,
    aux: Mapping[str, Tensor] | None,
    step: Step | None,
    state: State | None,
) -> Fitted:
    rows, clients = model.shape[0], len(data.count)
    stack = stack_of(network, model, samples, data, key, recipe, pull, trainable, aux, step, state)
    order = stack.order
    # rows with the most steps come first: then the rows still training are always the first ones, and the
    # rows of a chunk finish at about the same step
    ranking = np.argsort(-order.steps[np.arange(rows) % clients], kind="stable")
    out, losses = model.clone(), torch.zeros(rows, dtype=torch.float64, device=model.device)
    after = {name: value.clone() for name, value in (state or {}).items()}
    for part in np.array_split(ranking, -(-rows // plan.together)):
        chosen = torch.from_numpy(part)
        where = to_device(chosen, model.device)
        out[where], losses[where], kept = _train(stack, chosen, plan)
        for name, value in kept.items():
            after[name][where] = value
    steps = torch.from_numpy(order.steps).repeat(rows // clients)
    return Fitted(out, losses / to_device(steps, losses.device).clamp(min=1), steps, after)


def stack_of(
    network: Network,
    model: Tensor,
    samples: Samples,
    data: Padded,
    key: Key,
    recipe: Recipe,
    pull: tuple[Tensor, PerRow] | None = None,
    trainable: Tensor | None = None,
    aux: Mapping[str, Tensor] | None = None,
    step: Step | None = None,
    state: State | None = None,
) -> Stack:
    """What `fit` trains, with the order of its batches."""
    clients = len(data.count)
    order = schedule(
        key,
        data.count.cpu().numpy(),
        recipe.batch_size,
        _host(recipe.epochs, clients),
        None if recipe.steps is None else _host(recipe.steps, clients),
        recipe.shuffle,
        recipe.drop_last,
        model.device,
    )
    aux = with_privacy(aux, recipe, key, model, step is not None)
    return Stack.of(network, model, samples, data, key, recipe, order, pull, trainable, aux, step, state)


Trained = tuple[Tensor, Tensor, State]
"""Models, summed losses and, where it is kept, the optimiser's state of some rows."""


def _train(stack: Stack, rows: Tensor, plan: Plan) -> Trained:
    """Train these rows under the plan or, where it cannot run this model, under the next best one."""
    one_by_one = not stack.numbers.rule.by_row and (
        isinstance(stack.numbers.lr, Tensor) or stack.recipe.schedule is not None
    )
    for name in ("loop",) if one_by_one else plan.attempts(len(rows)):
        work: Callable[[], Trained]
        if name in REPLAYED:
            work = partial(replay, stack, rows, replace(plan, name=name))
        else:
            work = partial(_train_each if name == "loop" else _train_together, stack, rows, plan.precision)
        try:
            trained, losses, kept = stack.network.attempt(work, stacked=name in STACKED)
            return trained, losses.double(), kept
        except CannotReplay:  # the reason is in the log
            continue
    raise AssertionError("the last attempt is no replay")


def _train_together(stack: Stack, rows: Tensor, precision: Precision) -> Trained:
    """Train by plan `vmap`: all rows that still train, which are the first ones, take step t together."""
    network = stack.network
    params, buffers = stack.tensors(rows)
    wanted, partly = stack.trained()
    whole, factors = stack.update(rows, wanted, params, partly), stack.factors_of(rows)
    run = apply_step(network, stack.recipe.loss, stack.step, precision) if stack.step else None
    stepper = stacked_gradients(network, stack.recipe.loss, precision, stack.recipe)
    steps = stack.order.steps[stack.owner(rows).numpy()]
    losses = torch.zeros(len(rows), dtype=network.dtype, device=stack.model.device)
    sizes = stack.order.size[:, stack.owner(rows).numpy()]
    no_keys = torch.zeros(len(rows), dtype=torch.int64, device=stack.model.device)
    counts = [int((steps > t).sum()) for t in range(int(steps.max(initial=0)))]
    for t, batch in enumerate(stack.padded(rows, counts)):
        m = counts[t]
        now = slice(0, m)
        active, state = {k: v[now] for k, v in params.items()}, {k: v[now] for k, v in buffers.items()}
        key = stack.dropout(rows[now], t) if stack.needs_key else no_keys[now]
        update = whole.rows(now) if factors is None else whole.rows(now).scaled(factors[t, now])
        if run is not None:
            lr = torch.as_tensor(update.lr, dtype=network.dtype, device=stack.model.device).expand(m)
            fresh, state_fresh, value = Stacked.run(torch.func.vmap(run), active, state, batch, key, lr)
            _write(active, fresh, wanted, update.masks)
            _write(state, state_fresh, list(state))
        else:
            full = bool((sizes[t, now] == stack.recipe.batch_size).all())
            grads, value = stepper.gradients(wanted, active, state, batch, key, full)
            if t == 0:
                # from now on the tensors have the memory order of their gradients, which makes updates fast
                params |= {
                    name: arranged(params[name], grad) for name, grad in zip(wanted, grads, strict=True)
                }
                whole = whole.arranged(grads)
                update = replace(whole.rows(now), lr=update.lr)
            update.apply([params[name][now] for name in wanted], grads)
        losses[now] += value
    kept = stack.state_after(wanted, whole.state, whole.count)
    return network.layout.flatten(params | buffers), losses, kept


def _train_each(stack: Stack, rows: Tensor, precision: Precision) -> Trained:
    """Train by plan `loop`: one row after the other, each on exactly the samples it has. A real client runs
    the same code."""
    network, loss = stack.network, stack.recipe.loss
    params, buffers = stack.tensors(rows)
    wanted, partly = stack.trained()
    whole, factors = stack.update(rows, wanted, params, partly), stack.factors_of(rows)
    run = apply_step(network, loss, stack.step, precision) if stack.step else None
    stepper = single_gradients(network, loss, precision, stack.recipe)
    losses = torch.zeros(len(rows), dtype=network.dtype, device=stack.model.device)
    own_luck = no_luck(stack.model.device)
    for i, row in enumerate(rows):
        own, state, update = (
            {k: v[i] for k, v in params.items()},
            {k: v[i] for k, v in buffers.items()},
            whole.rows(i),
        )
        stepper.bind(own, state)
        owner, lr_at_first = int(stack.owner(row)), float(update.lr)
        own_factors = None if factors is None else factors[:, i].tolist()
        batches = stack.batches(int(row), owner)
        for t in range(int(stack.order.steps[owner])):
            batch = next(batches)
            key = stack.dropout(row[None], t)[0] if stack.needs_key else _NO_KEY
            if own_factors is not None:
                update.lr = lr_at_first * own_factors[t]
            if run is not None:
                lr = torch.as_tensor(update.lr, dtype=network.dtype, device=stack.model.device)
                fresh, state_fresh, value = run(own, state, batch, key, lr)
                _write(own, fresh, wanted, update.masks)
                _write(state, state_fresh, list(state))
            else:
                grads, value = stepper.gradients(wanted, batch, key)
                with torch.no_grad():
                    update.apply([own[name] for name in wanted], grads)
            losses[i] += value
            if i == t == 0:  # most models that draw do so in every step
                own_luck()
    own_luck()
    kept = stack.state_after(wanted, whole.state, whole.count)
    return network.layout.flatten(params | buffers), losses, kept


def _write(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor], names: list[str], masks: list[Tensor] | None = None
) -> None:
    for place, name in enumerate(names):
        fresh = new[name].detach()
        old[name].copy_(fresh if masks is None else torch.where(masks[place], fresh, old[name]))


def _host(value: int | Tensor, clients: int) -> np.ndarray:
    if isinstance(value, Tensor):
        return plain(value).cpu().numpy().astype(np.int64)
    return np.full(clients, value, dtype=np.int64)
