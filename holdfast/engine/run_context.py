"""One experiment as an engine sees it: the client half, its network, its data, its private rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks.adversary import Adversary
from holdfast.core.flat import Wire
from holdfast.core.keys import Key
from holdfast.core.share import Share
from holdfast.core.types import ROOT, Exchange
from holdfast.data.federation import ClientRows, Federation, Padded
from holdfast.local.fit import Recipe
from holdfast.local.function_identity import identity
from holdfast.local.optimizers.sgd import Sgd
from holdfast.local.schedules import Schedule
from holdfast.local.stack import StepFactors
from holdfast.methods.base import ClientRule, Method
from holdfast.models.network import Network
from holdfast.privacy.protection import Protection
from holdfast.storage.client_state import RowStore


@dataclass(frozen=True)
class Measure:
    """What is measured on a client: which of its models, on which data, which model clients inside and
    outside the cohort use, and which metrics beside accuracy and loss."""

    models: tuple[str, ...]
    test: str = "per-client"
    unselected: str = "keep_own"
    validation: bool = False
    metrics: tuple[str, ...] = ()
    trigger: bool = False
    """Whether test samples with an attack's trigger are shown to the models too."""
    of_target: bool = False
    """Whether those of them that show the trigger's target anyway are counted by themselves too."""
    selected: str = "deliver"
    moving: str = ""
    """The attack whose trigger changes from round to round; nothing where there is none."""


@dataclass
class RunContext:
    """One experiment as an engine sees it. Its fields change only between rounds; `round` counts from 1."""

    label: str
    key: Key
    method: Method
    rule: ClientRule
    network: Network
    initial: Tensor
    federation: Federation
    recipe: Recipe
    lr_decay: float
    measure: Measure
    rows: RowStore
    adversary: Adversary
    norm_cap: float | None = None
    schedule: Schedule | None = None
    rounds: int = 0
    """All rounds of the experiment: a schedule over rounds may depend on their number."""
    privacy: Protection | None = None
    """How honest clients protect what they send; on a node of a federation its guard does that."""
    secret_noise: bool = False
    """Whether the noise of DP-SGD comes from the operating system and not from the run's key: on a node,
    whose server knows the key."""
    passes: tuple[Tensor, Tensor] | None = None
    """Under DP-SGD: clients that trained in the last exchange, and their passes over the data and steps."""
    round: int = 0
    home: torch.device = torch.device("cpu")
    """Where what clients send is kept, and where the server, attacks and screening compute."""
    share: Share | None = None
    """Which clients this process has, where several run the experiment together."""
    _wire: tuple[int, Tensor, Wire] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def plan_key(self) -> str:
        """The key by which a plan is chosen: time and memory of a step depend on it."""
        rule = self.recipe.optimizer
        update = "" if type(rule) is Sgd else f" {rule.name} {' '.join(rule.keeps(False))}"
        update += "" if self.recipe.sample_clip is None else " per sample"
        return f"{self.network.signature} {self.network.dtype} batch {self.recipe.batch_size}{update}"

    def wire(self) -> Wire:
        """What travels in this round; the same object as before where nothing else does."""
        if self._wire is None or self._wire[0] != self.round:
            shared, last = self.rule.shared(self.network, self.round), self._wire
            same = last is not None and torch.equal(last[1], shared)
            wire = last[2] if last is not None and same else Wire.of(self.network.layout, shared)
            self._wire = self.round, shared, wire
        return self._wire[2]

    def lr(self) -> float:
        """The learning rate of this round."""
        lr = float(self.recipe.lr) * self.lr_decay ** (self.round - 1)
        return lr if self.schedule is None else lr * self.schedule.of_round(self.round, self.rounds)

    def step_factors(self) -> StepFactors | None:
        """The factors of the learning rate within this round, where the schedule is one over steps."""
        if self.schedule is None or self.schedule.over != "steps":
            return None
        return partial(self.schedule.of_steps, self.round)

    def data(self, ids: Tensor) -> Padded:
        """Training data by client id; the root pseudo-client has the server's own data."""
        return take(self.adversary.train(self.federation, self.round), ids, self.federation.root)

    def clean(self, ids: Tensor) -> Padded:
        """The training data of attackers before it was poisoned."""
        honest = self.adversary.honest
        return take((self.federation if honest is None else honest).train, ids, None)

    def validation(self, ids: Tensor) -> Padded:
        return take(self.federation.validation, ids, None)

    def test(self, ids: Tensor) -> Padded:
        if self.measure.test == "per-client":
            return take(self.federation.test, ids, None)
        return self.federation.global_test.take(torch.zeros(len(ids), dtype=torch.int64))

    def triggered(self, ids: Tensor) -> list[Padded]:
        """The triggered test samples of these clients, and those of them that show the target anyway, where
        they are counted too."""
        tables = self.adversary.triggered
        assert tables is not None
        whose = ids if self.measure.test == "per-client" else torch.zeros(len(ids), dtype=torch.int64)
        return [table.take(whose) for table in tables if table is not None]

    def fact(self, name: str, ids: Tensor) -> Tensor:
        """A fact that the partition records of these clients; -1 where it records none, and for the root
        pseudo-client."""
        facts = self.federation.facts.get(name)
        return torch.full_like(ids, -1) if facts is None else torch.where(ids == ROOT, -1, facts[ids])

    def group(self, task: str) -> tuple[Any, ...]:
        """Exchanges with equal keys are trained as one computation; learning rate, epochs, seed and real
        settings may differ."""
        r = self.recipe
        return (
            task,
            self.method.structure(),
            self.network.signature,
            self.network.dtype,
            id(self.federation.samples),
            self.measure if task == "evaluate" else None,
            r.batch_size,
            r.shuffle,
            r.drop_last,
            r.augment,
            identity(r.loss),
            r.steps is None,
            identity(r.optimizer),
            # the rows of a client's kept state are equal in all experiments of a stack
            r.optimizer.persist and float(r.momentum) > 0,
            r.clip_gradient is None,
            r.sample_clip is None,
            None if self.step_factors() is None else identity(self.schedule),
            # what gives the rate of every round; not that of this round, so that groups stay as they are
            None if r.optimizer.by_row else (r.lr, self.lr_decay, self.rounds, identity(self.schedule)),
        )

    def attackers(self) -> tuple[Any, ...]:
        """Attackers of experiments for which this is equal, too, may do their own work as one stack."""
        attack = self.adversary.attack
        return () if attack is None else attack.structure()


@dataclass(frozen=True)
class Call:
    """One experiment's request to some of its clients."""

    run_context: RunContext
    exchange: Exchange
    work: str = ""
    """A piece of work of these attackers, in place of the task (attacks/own_training.py)."""


def take(table: ClientRows, ids: Tensor, root: ClientRows | None) -> Padded:
    """A table's rows by client id, where the root pseudo-client may come first."""
    clients = ids[ids != ROOT]
    if len(clients) == len(ids):
        return table.take(ids)
    if root is None:
        return join([_empty(), table.take(clients)])
    return join([root.take(torch.zeros(1, dtype=torch.int64)), table.take(clients)])


def join(parts: list[Padded]) -> Padded:
    """Padded tables of several groups of clients as one, as wide as the widest."""
    if len(parts) == 1:
        return parts[0]
    width = max(p.rows.shape[1] for p in parts)

    def widen(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, width - x.shape[1]))

    rows, labels = torch.cat([widen(p.rows) for p in parts]), torch.cat([widen(p.labels) for p in parts])
    return Padded(rows, labels, torch.cat([p.count for p in parts]))


def _empty() -> Padded:
    no_rows = torch.zeros(1, 1, dtype=torch.int64)
    return Padded(no_rows, no_rows, torch.zeros(1, dtype=torch.int64))
