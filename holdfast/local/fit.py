"""The only training loop: a stack of clients, each from its own model on its own batches, by any loss written for one client."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import RunError
from holdfast.core.flat import Layout
from holdfast.core.keys import Key
from holdfast.data.federation import Padded, Samples
from holdfast.local.augment import Augment
from holdfast.local.losses import Batch, Loss, cross_entropy
from holdfast.local.plan import Plan
from holdfast.local.schedule import Schedule, schedule
from holdfast.local.sgd import PerRow, Sgd, arranged, per_row
from holdfast.local.steps import OWN_LUCK, Single, Stacked, Step, apply_step
from holdfast.models.network import Network

_FETCH_AT_ONCE = 1 << 24  # values of a client or a chunk that are normalised ahead of its steps (64 MiB in float32)
_NO_KEY = torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True)
class Recipe:
    """How a local training runs. Numbers may be tensors with one value per client."""

    lr: PerRow = 0.01
    epochs: int | Tensor = 1
    steps: int | Tensor | None = None
    """Local steps instead of epochs, where given."""
    batch_size: int = 10
    momentum: PerRow = 0.0
    weight_decay: PerRow = 0.0
    shuffle: bool = True
    drop_last: bool = False
    augment: Augment = field(default_factory=Augment)
    loss: Loss = cross_entropy


@dataclass(frozen=True)
class Fitted:
    """What came out: models [rows, size], mean loss over the steps [rows], steps taken [rows]."""

    model: Tensor
    loss: Tensor
    steps: Tensor


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
) -> Fitted:
    """Train a stack of models [r * n, size] on the data of n clients: row i belongs to client i mod n, and all models of a client see the
    same batches. `pull = (target, lam)` adds lam * (parameters - target) to the gradient, `trainable` (bool[size] or one per row) freezes
    the rest, `aux` are tensors with one row per client (or per model) that the loss finds in `batch.aux`."""
    if step is not None and pull is not None:
        raise TypeError("fit: a step function does its own pulling; give `pull` or `step`, not both")
    rows, clients = model.shape[0], len(data.count)
    if not rows:
        return Fitted(model.clone(), torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    count = data.count.cpu().numpy()
    order = schedule(
        key, count, recipe.batch_size, _host(recipe.epochs, clients), None if recipe.steps is None else _host(recipe.steps, clients),
        recipe.shuffle, recipe.drop_last,
    )  # fmt: skip
    stack = _Stack.of(network, model, samples, data, key, recipe, order, pull, trainable, aux or {}, step)
    train, most = (_train_each, plan.rows) if plan.name == "loop" else (_train_together, min(plan.rows, plan.stack or plan.rows))
    # rows with the most steps first: those still running are then always the first ones, and a chunk's rows end close together
    ranking = np.argsort(-order.steps[np.arange(rows) % clients], kind="stable")
    out, losses = model.clone(), torch.zeros(rows, dtype=torch.float64)
    for part in np.array_split(ranking, -(-rows // most)):
        chosen = torch.from_numpy(part)
        trained, loss = network.attempt(partial(train, stack, chosen), stacked=plan.name != "loop")
        out[chosen.to(out.device)] = trained
        losses[chosen] = loss.double().cpu()
    steps = torch.from_numpy(order.steps).repeat(rows // clients)
    return Fitted(out, losses / steps.clamp(min=1), steps)


@dataclass(frozen=True)
class _Stack:
    """Everything a chunk of rows is cut from."""

    network: Network
    model: Tensor
    samples: Samples
    data: Padded
    key: Key
    recipe: Recipe
    order: Schedule
    sgd: Sgd
    target: Tensor | None
    mask: Tensor
    aux: Mapping[str, Tensor]
    step: Step | None

    @classmethod
    def of(
        cls, network: Network, model: Tensor, samples: Samples, data: Padded, key: Key, recipe: Recipe, order: Schedule,
        pull: tuple[Tensor, PerRow] | None, trainable: Tensor | None, aux: Mapping[str, Tensor], step: Step | None,
    ) -> _Stack:  # fmt: skip
        rows, device = model.shape[0], model.device
        target, lam = pull if pull is not None else (None, 0.0)
        if target is not None and target.shape[0] != rows:
            target = target.repeat(rows // target.shape[0], 1)
        lr, momentum, decay, pulled = (per_row(v, rows, device) for v in (recipe.lr, recipe.momentum, recipe.weight_decay, lam))
        sgd = Sgd(lr, momentum, decay, pulled)
        mask = network.layout.trainable if trainable is None else trainable.cpu() & network.layout.trainable
        spread = {name: value.repeat(rows // value.shape[0], *[1] * (value.ndim - 1)) for name, value in aux.items()}
        return cls(network, model, samples, data, key, recipe, order, sgd, target, mask, spread, step)

    def owner(self, rows: Tensor) -> Tensor:
        return rows % len(self.data.count)

    def tensors(self, rows: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers of these rows, contiguous, free to be changed in place."""
        views = self.network.layout.tensors(self.model[rows.to(self.model.device)])
        named = {name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}
        params = {s.name: named[s.name] for s in self.network.layout.slots if not s.buffer}
        return params, {s.name: named[s.name] for s in self.network.layout.slots if s.buffer}

    def trained(self) -> tuple[list[str], bool]:
        """Names of the tensors that change at all, and whether some change only in part."""
        chosen = [s for s in self.network.layout.slots if bool(self.mask[..., s.start : s.stop].any())]
        return [s.name for s in chosen], not all(bool(self.mask[..., s.start : s.stop].all()) for s in chosen)

    def optimiser(self, rows: Tensor, wanted: list[str], params: Mapping[str, Tensor], partly: bool) -> Sgd:
        """The update rule of these rows, with its own momentum buffers."""
        device = self.model.device

        def pick(value: PerRow) -> PerRow:
            return value[rows.to(device)] if isinstance(value, Tensor) else value

        layout, momentum = self.network.layout, self.sgd.momentum
        return Sgd(
            pick(self.sgd.lr), pick(momentum), pick(self.sgd.weight_decay), pick(self.sgd.pull),
            [torch.zeros_like(params[name]) for name in wanted] if isinstance(momentum, Tensor) or momentum else None,
            None if self.target is None else _named(layout, self.target[rows.to(device)], wanted),
            _named(layout, (self.mask if self.mask.ndim == 2 else self.mask.expand(len(self.model), -1))[rows].to(device), wanted)
            if partly else None,
        )  # fmt: skip

    def fetch(self, owner: int | Tensor) -> Tensor | None:
        """All samples of a client, or of several, normalised; None where that is too much to hold and each step fetches its own."""
        rows = self.data.rows[owner]
        small = rows.numel() * math.prod(self.samples.sample_shape) <= _FETCH_AT_ONCE
        return self.samples.batch(rows, dtype=self.network.dtype) if small else None

    def padded(self, rows: Tensor, active: list[int]) -> Iterator[Batch]:
        """The batches [m, B, ...] of the first m = active[t] of these rows, step after step, padded."""
        owner, device = self.owner(rows), self.model.device
        position = self.order.index[: len(active), owner].to(device)
        # padding repeats the batch's own first sample: any other could have an infinite loss, which a mask of 0 does not undo
        real, mine = position >= 0, owner.to(device)[:, None]
        position = torch.where(real, position, position[..., :1])
        labels, mask, ready = self.data.labels[mine, position], real.to(self.network.dtype), self.fetch(owner)
        first = torch.arange(len(rows), device=device)[:, None] * self.data.rows.shape[1]  # of a row's samples among all that are ready
        aux = {name: value[rows.to(value.device)] for name, value in self.aux.items()}
        for t, m in enumerate(active):
            now = position[t, :m]
            if ready is not None:
                x = ready.flatten(0, 1).index_select(0, (first[:m] + now).flatten()).unflatten(0, now.shape)
            else:
                x = self.samples.batch(self.data.rows[mine[:m], now], self.network.dtype)
            if self.recipe.augment.active:
                x = self.recipe.augment(x, self.key[owner[:m]].to(device).fold("augment", t))
            yield Batch(x, labels[t, :m], mask[t, :m], {name: value[:m] for name, value in aux.items()})

    def batches(self, row: int, owner: int) -> Iterator[Batch]:
        """One client's batches, step after step, without padding. Small clients are fetched once, large ones batch by batch."""
        device, dtype, augment = self.model.device, self.network.dtype, self.recipe.augment
        rows, ready, sizes = self.data.rows[owner], self.fetch(owner), self.order.size[:, owner].tolist()
        ready = ready if ready is None else self.network.ordered(ready)
        ones = torch.ones(self.recipe.batch_size, dtype=dtype, device=device)
        aux = {name: value[row] for name, value in self.aux.items()}
        index = self.order.index[:, owner].to(device)
        labels = self.data.labels[owner][index]  # beyond a batch's size, where the index is -1, nobody looks
        for t in range(int(self.order.steps[owner])):
            size = sizes[t]
            position = index[t, :size]
            x = ready[position] if ready is not None else self.samples.batch(rows[position], dtype=dtype)
            if augment.active:
                x = augment(x[None], self.key[owner : owner + 1].to(device).fold("augment", t))[0]
            yield Batch(self.network.ordered(x), labels[t, :size], ones[:size], aux)

    def dropout(self, rows: Tensor, t: int) -> Tensor:
        return self.key[self.owner(rows)].fold("dropout", t).bits.to(self.model.device)


def _train_together(stack: _Stack, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Plan `vmap`: all rows take their step t together; rows that have finished have fallen off the end."""
    network = stack.network
    params, buffers = stack.tensors(rows)
    wanted, partly = stack.trained()
    sgd = stack.optimiser(rows, wanted, params, partly)
    run = apply_step(network, stack.recipe.loss, stack.step) if stack.step else None
    stepper = Stacked(network, stack.recipe.loss)
    steps = stack.order.steps[stack.owner(rows).numpy()]
    losses = torch.zeros(len(rows), dtype=network.dtype, device=stack.model.device)
    sizes = stack.order.size[:, stack.owner(rows).numpy()]
    no_keys = torch.zeros(len(rows), dtype=torch.int64, device=stack.model.device)
    counts = [int((steps > t).sum()) for t in range(int(steps.max(initial=0)))]
    for t, batch in enumerate(stack.padded(rows, counts)):
        m = counts[t]
        now = slice(0, m)
        active, state = {k: v[now] for k, v in params.items()}, {k: v[now] for k, v in buffers.items()}
        key = stack.dropout(rows[now], t) if network.keyed else no_keys[now]
        if run is not None:
            lr = torch.as_tensor(sgd.rows(now).lr, dtype=network.dtype, device=stack.model.device).expand(m)
            fresh, state_fresh, value = Stacked.run(torch.func.vmap(run), active, state, batch, key, lr)
            _write(active, fresh, wanted, sgd.rows(now).masks)
            _write(state, state_fresh, list(state))
        else:
            full = bool((sizes[t, now] == stack.recipe.batch_size).all())
            grads, value = stepper.gradients(wanted, active, state, batch, key, full)
            if t == 0:  # from here on in the order of their gradients, so that updates run straight through memory
                params |= {name: arranged(params[name], grad) for name, grad in zip(wanted, grads, strict=True)}
                sgd = sgd.arranged(grads)
            sgd.rows(now).apply([params[name][now] for name in wanted], grads)
        losses[now] += value
    return network.layout.flatten(params | buffers), losses


def _train_each(stack: _Stack, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Plan `loop`: one row after the other, each on exactly the samples it has; the same code a real client runs."""
    network, loss = stack.network, stack.recipe.loss
    params, buffers = stack.tensors(rows)
    wanted, partly = stack.trained()
    sgd = stack.optimiser(rows, wanted, params, partly)
    run = apply_step(network, loss, stack.step) if stack.step else None
    stepper = Single(network, loss)
    losses = torch.zeros(len(rows), dtype=network.dtype, device=stack.model.device)
    luck = _luck(stack.model.device)
    for i, row in enumerate(rows):
        own, state, update = {k: v[i] for k, v in params.items()}, {k: v[i] for k, v in buffers.items()}, sgd.rows(i)
        stepper.bind(own, state)
        owner = int(stack.owner(row))
        batches = stack.batches(int(row), owner)
        for t in range(int(stack.order.steps[owner])):
            batch = next(batches)
            key = stack.dropout(row[None], t)[0] if network.keyed else _NO_KEY
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
    if not all(map(torch.equal, luck, _luck(stack.model.device))):
        raise RunError(OWN_LUCK)
    return network.layout.flatten(params | buffers), losses


def _write(old: Mapping[str, Tensor], new: Mapping[str, Tensor], names: list[str], masks: list[Tensor] | None = None) -> None:
    for place, name in enumerate(names):
        fresh = new[name].detach()
        old[name].copy_(fresh if masks is None else torch.where(masks[place], fresh, old[name]))


def _luck(device: torch.device) -> list[Tensor]:
    """PyTorch's own random state, which a keyed training leaves alone."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _named(layout: Layout, vectors: Tensor, names: list[str]) -> list[Tensor]:
    views = layout.unflatten(vectors.contiguous())
    return [views[name] for name in names]


def _host(value: int | Tensor, clients: int) -> np.ndarray:
    if isinstance(value, Tensor):
        return value.cpu().numpy().astype(np.int64)
    return np.full(clients, value, dtype=np.int64)
