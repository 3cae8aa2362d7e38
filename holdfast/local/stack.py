"""The input of a training: models, data, batches and update rule of all rows. A plan selects the rows that it
trains together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from holdfast.core.device import to_device
from holdfast.core.flat import Layout
from holdfast.core.keys import Key
from holdfast.core.types import State
from holdfast.data.federation import Padded, Samples
from holdfast.local.augment import Augment
from holdfast.local.batch_order import Schedule
from holdfast.local.gradients import Step
from holdfast.local.losses import Batch, Loss, cross_entropy
from holdfast.local.optimizers.base import Optimizer
from holdfast.local.optimizers.sgd import Sgd
from holdfast.local.per_client import plain
from holdfast.local.row_numbers import PerRow, per_row
from holdfast.local.update import Update
from holdfast.models.network import Network

# values of a client or a chunk that are normalised before its steps (64 MiB in float32)
_FETCH_AT_ONCE = 1 << 24
_WRITTEN_AT_ONCE = 1 << 23  # numbers that `written_out` computes ahead of the steps (64 MiB)
COUNT = "step"
"""The name under which the number of steps taken is kept, beside an optimiser's tensors."""
StepFactors = Callable[[int], Sequence[float]]
"""From the number of steps that a client takes to the factor of its learning rate in each of them."""


@dataclass(frozen=True)
class Recipe:
    """How a local training runs. Numbers may be tensors with one value per client."""

    lr: PerRow = 0.01
    epochs: int | Tensor = 1
    steps: int | Tensor | None = None
    """The number of local steps; where given, it replaces `epochs`."""
    batch_size: int = 10
    momentum: PerRow = 0.0
    weight_decay: PerRow = 0.0
    shuffle: bool = True
    drop_last: bool = False
    augment: Augment = field(default_factory=Augment)
    loss: Loss = cross_entropy
    optimizer: Optimizer = field(default_factory=Sgd)
    clip_gradient: PerRow | None = None
    """The largest norm of a client's whole gradient; None: no bound."""
    schedule: StepFactors | None = None
    sample_clip: PerRow | None = None
    """DP-SGD: the largest norm of the gradient of a single sample; None: samples are not clipped."""
    sample_noise: PerRow = 0.0
    """DP-SGD: deviation of the noise on the sum of a batch's clipped gradients."""
    noise_key: Tensor | None = None
    """DP-SGD on a node: randomness of its own, one number for each client; None: the run's key decides."""

    def held(self) -> int:
        """How many times a stack holds the size of the parameters for each model, beside their values."""
        return self.optimizer.held() + (0 if self.sample_clip is None else self.batch_size)


@dataclass(frozen=True)
class Stack:
    """Everything that the training of a chunk of rows needs, for all rows."""

    network: Network
    model: Tensor
    samples: Samples
    data: Padded
    key: Key
    recipe: Recipe
    order: Schedule
    numbers: Update
    """The optimiser and its numbers, without the rows' state."""
    target: Tensor | None
    mask: Tensor
    aux: Mapping[str, Tensor]
    step: Step | None
    kept: State | None = None
    """The optimiser's state to start from, where it is kept from round to round: [rows, parameters] each, and
    the number of steps."""

    @classmethod
    def of(
        cls,
        network: Network,
        model: Tensor,
        samples: Samples,
        data: Padded,
        key: Key,
        recipe: Recipe,
        order: Schedule,
        pull: tuple[Tensor, PerRow] | None,
        trainable: Tensor | None,
        aux: Mapping[str, Tensor],
        step: Step | None,
        kept: State | None = None,
    ) -> Stack:
        rows, device = model.shape[0], model.device
        target, lam = pull if pull is not None else (None, 0.0)
        if target is not None and target.shape[0] != rows:
            target = target.repeat(rows // target.shape[0], 1)
        lr, momentum, decay, pulled = (
            per_row(plain(v), rows, device) for v in (recipe.lr, recipe.momentum, recipe.weight_decay, lam)
        )
        clip = None if recipe.clip_gradient is None else per_row(plain(recipe.clip_gradient), rows, device)
        numbers = Update(recipe.optimizer, lr, momentum, decay, pulled, clip)
        mask = network.layout.trainable if trainable is None else trainable.cpu() & network.layout.trainable
        aux = {name: plain(value) for name, value in aux.items()}
        spread = {
            name: value.repeat(rows // value.shape[0], *[1] * (value.ndim - 1)) for name, value in aux.items()
        }
        return cls(
            network, model, samples, data, key, recipe, order, numbers, target, mask, spread, step, kept
        )

    def owner(self, rows: Tensor) -> Tensor:
        return rows % len(self.data.count)

    def tensors(self, rows: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return contiguous copies of these rows' parameters and buffers, which may be changed in place."""
        views = self.network.layout.tensors(self.model[to_device(rows, self.model.device)])
        named = {name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}
        params = {s.name: named[s.name] for s in self.network.layout.slots if not s.buffer}
        return params, {s.name: named[s.name] for s in self.network.layout.slots if s.buffer}

    def trained(self) -> tuple[list[str], bool]:
        """Return the names of the tensors that training changes, and whether it changes some only in part."""
        return self._trained

    @cached_property
    def _trained(self) -> tuple[list[str], bool]:
        chosen = [s for s in self.network.layout.slots if bool(self.mask[..., s.start : s.stop].any())]
        return [s.name for s in chosen], not all(bool(self.mask[..., s.start : s.stop].all()) for s in chosen)

    @cached_property
    def full(self) -> bool:
        """Whether no batch is ever padded, for any number of steps."""
        return self.recipe.drop_last or bool((self.data.count.cpu() % self.recipe.batch_size == 0).all())

    @cached_property
    def factors(self) -> Tensor | None:
        """float64[steps, clients]: the factor of the learning rate of each client at each step, where a
        schedule changes it."""
        if self.recipe.schedule is None:
            return None
        steps = self.order.steps
        table = np.ones((int(steps.max(initial=0)), len(steps)))
        for count in np.unique(steps).tolist():
            table[:count, steps == count] = np.asarray(self.recipe.schedule(count), dtype=np.float64)[:, None]
        return to_device(torch.from_numpy(table), self.model.device)

    def factors_of(self, rows: Tensor) -> Tensor | None:
        """float64[steps, m]: the same for these rows."""
        return (
            None if self.factors is None else self.factors[:, to_device(self.owner(rows), self.model.device)]
        )

    def buffers(self) -> tuple[str, ...]:
        """Return the names of the tensors that the optimiser keeps for each parameter."""
        momentum = self.numbers.momentum
        return self.numbers.rule.keeps(isinstance(momentum, Tensor) or bool(momentum))

    def update(self, rows: Tensor, wanted: list[str], params: Mapping[str, Tensor], partly: bool) -> Update:
        """Return the update of these rows, with its own state: fresh, or as it was kept."""
        device, layout, rule = self.model.device, self.network.layout, self.numbers.rule
        where = to_device(rows, device)

        def pick(value: PerRow) -> PerRow:
            return value[where] if isinstance(value, Tensor) else value

        def start(name: str) -> list[Tensor]:
            if self.kept is None:
                return [torch.zeros_like(params[key]) for key in wanted]
            kept, slots = self.kept[name][where], {slot.name: slot for slot in layout.slots}
            return [
                kept[:, slots[key].start : slots[key].stop].reshape(len(rows), *slots[key].shape).clone()
                for key in wanted
            ]

        count = None
        if rule.counts:
            fresh = torch.zeros(len(rows), dtype=torch.int64, device=device)
            count = fresh if self.kept is None else self.kept[COUNT][where].clone()
        masks = self.mask if self.mask.ndim == 2 else self.mask.expand(len(self.model), -1)
        return Update(
            rule,
            pick(self.numbers.lr),
            pick(self.numbers.momentum),
            pick(self.numbers.weight_decay),
            pick(self.numbers.pull),
            None if self.numbers.clip is None else pick(self.numbers.clip),
            {name: start(name) for name in self.buffers()},
            count,
            None if self.target is None else _named(layout, self.target[where], wanted),
            _named(layout, to_device(masks[rows], device), wanted) if partly else None,
        )

    def state_after(
        self, wanted: list[str], buffers: Mapping[str, list[Tensor]], count: Tensor | None
    ) -> State:
        """Return an optimiser's state as it is kept; nothing where it is not."""
        if self.kept is None:
            return {}
        slots, out = {slot.name: slot for slot in self.network.layout.slots}, {}
        for name, tensors in buffers.items():
            flat = tensors[0].new_zeros(len(tensors[0]), self.kept[name].shape[1]) if tensors else None
            if flat is None:
                continue
            for key, tensor in zip(wanted, tensors, strict=True):
                flat[:, slots[key].start : slots[key].stop] = tensor.reshape(len(tensor), -1)
            out[name] = flat
        return out if count is None else {**out, COUNT: count}

    def fetch(self, owner: int | Tensor) -> Tensor | None:
        """Return all samples of one or several clients, normalised; None where they need too much memory and
        each step fetches its own."""
        rows = self.data.rows[owner if isinstance(owner, int) else to_device(owner, self.model.device)]
        small = rows.numel() * math.prod(self.samples.sample_shape) <= _FETCH_AT_ONCE
        return self.samples.batch(rows, dtype=self.network.dtype) if small else None

    def positions(self, rows: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return [steps, m, B] positions in each row's own table and which of them are real, and [m, 1] the
        client that owns the table."""
        owner = to_device(self.owner(rows), self.model.device)
        position = self.order.index[:steps, owner]
        # padding repeats the first sample of the batch: another sample could have an infinite loss, and
        # infinity times a mask of 0 is NaN
        real = position >= 0
        return (
            torch.where(real, position, position[..., :1].clamp(min=0)),
            real,
            owner[:, None],
        )

    def padded(self, rows: Tensor, active: list[int]) -> Iterator[Batch]:
        """Yield for each step t the padded batches [m, B, ...] of the first m = active[t] of these rows."""
        owner, device = self.owner(rows), self.model.device
        position, real, mine = self.positions(rows, len(active))
        labels, mask, ready = self.data.labels[mine, position], real.to(self.network.dtype), self.fetch(owner)
        # the place of each row's first sample in `ready`
        first = torch.arange(len(rows), device=device)[:, None] * self.data.rows.shape[1]
        aux = self.aux_of(rows)
        for t, m in enumerate(active):
            now = position[t, :m]
            if ready is not None:
                x = ready.flatten(0, 1).index_select(0, (first[:m] + now).flatten()).unflatten(0, now.shape)
            else:
                x = self.samples.batch(self.data.rows[mine[:m], now], self.network.dtype)
            if self.recipe.augment.active:
                x = self.recipe.augment(x, _key_to_device(self.key[owner[:m]], device).fold("augment", t))
            yield Batch(x, labels[t, :m], mask[t, :m], {name: value[:m] for name, value in aux.items()})

    def written_out(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield for each step one int64 tensor [m, 2 B + 4] with all that differs between steps: rows in the
        sample store, labels, how many of them are real, whether the row still trains, the keys of Dropout and
        augmentation. These are computed ahead, on the device, in blocks of steps."""
        owner, device = self.owner(rows), self.model.device
        steps = torch.from_numpy(self.order.steps)[owner]
        total = int(steps.max()) if len(rows) else 0
        position, real, mine = self.positions(rows, total)
        key, steps = _key_to_device(self.key[owner], device), to_device(steps, device)
        block = max(1, _WRITTEN_AT_ONCE // (len(rows) * (2 * self.recipe.batch_size + 4)))
        for start in range(0, total, block):
            where = position[start : start + block]
            t = torch.arange(start, start + len(where), device=device)[:, None]
            luck = [key.fold(purpose).fold(t).bits for purpose in ("dropout", "augment")]
            about = [real[start : start + block].sum(-1), (t < steps).long(), *luck]
            yield from torch.cat(
                [self.data.rows[mine, where], self.data.labels[mine, where], torch.stack(about, -1)], -1
            )

    def aux_of(self, rows: Tensor) -> dict[str, Tensor]:
        return {name: value[to_device(rows, value.device)] for name, value in self.aux.items()}

    def batches(self, row: int, owner: int) -> Iterator[Batch]:
        """Yield one client's batches, step after step, without padding. The samples of a small client are
        fetched once, those of a large one batch by batch."""
        device, dtype, augment = self.model.device, self.network.dtype, self.recipe.augment
        rows, ready, sizes = self.data.rows[owner], self.fetch(owner), self.order.size[:, owner].tolist()
        ready = ready if ready is None else self.network.ordered(ready)
        ones = torch.ones(self.recipe.batch_size, dtype=dtype, device=device)
        aux = {name: value[row] for name, value in self.aux.items()}
        index = self.order.index[:, owner]
        # entries beyond a batch's size, where the index is -1, are not used
        labels = self.data.labels[owner][index]
        for t in range(int(self.order.steps[owner])):
            size = sizes[t]
            position = index[t, :size]
            x = ready[position] if ready is not None else self.samples.batch(rows[position], dtype=dtype)
            if augment.active:
                x = augment(x[None], _key_to_device(self.key[owner : owner + 1], device).fold("augment", t))[
                    0
                ]
            yield Batch(self.network.ordered(x), labels[t, :size], ones[:size], aux)

    @property
    def needs_key(self) -> bool:
        """Whether a step draws random numbers: for the model, or for the noise of DP-SGD."""
        return self.network.needs_key or self.recipe.sample_clip is not None

    def dropout(self, rows: Tensor, t: int) -> Tensor:
        return to_device(self.key[self.owner(rows)].fold("dropout", t).bits, self.model.device)


def _named(layout: Layout, vectors: Tensor, names: list[str]) -> list[Tensor]:
    views = layout.unflatten(vectors.contiguous())
    return [views[name] for name in names]


def _key_to_device(key: Key, device: torch.device) -> Key:
    return Key(to_device(key.bits, device))
