"""What a client half works with: its data, its settings, its randomness, and `fit`. Tensors have a leading
client axis; n = 1 on a real client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.core.flat import Wire
from holdfast.core.keys import Key
from holdfast.core.types import State
from holdfast.data.federation import Padded, Samples
from holdfast.local.fit import Fitted, Recipe, fit
from holdfast.local.optimizer_memory import OptimizerMemory
from holdfast.local.optimizers.sgd import Sgd
from holdfast.local.per_client import Settings
from holdfast.local.plan import Plan
from holdfast.models.network import Network


@dataclass(frozen=True)
class Received:
    """What the clients were sent: client i holds the models `bank[pick[i]]`; -1 where it got none."""

    bank: Tensor
    pick: Tensor
    wire: Wire

    @property
    def model(self) -> Tensor:
        """[n, what travels]: each client's first model; a view when all have the same."""
        return self.models(0)

    @property
    def has(self) -> Tensor:
        """bool[n]: which clients received a first model."""
        if self.pick.shape[1] == 0:
            return torch.zeros(len(self.pick), dtype=torch.bool)
        return self.pick[:, 0] >= 0

    def models(self, j: int) -> Tensor:
        pick = self.pick[:, j]
        if self.bank.shape[0] == 1:
            return self.bank.expand(len(pick), -1)
        return self.bank[pick.clamp(min=0).to(self.bank.device)]

    def into(self, own: Tensor) -> Tensor:
        """Each client's whole model: the entries that were sent, and the client's own for the rest."""
        has = self.has.to(own.device)
        if not bool(has.any()):
            return own
        whole = self.wire.unpack(self.model, own)
        return whole if bool(has.all()) else torch.where(has[:, None], whole, own)


@dataclass(frozen=True)
class Local:
    """What a client half may use. `settings` are the method's numbers, each a tensor [n]: fused experiments
    may differ in them."""

    network: Network
    wire: Wire
    ids: Tensor
    key: Key
    samples: Samples
    data: Padded
    validation: Padded
    initial: Tensor
    recipe: Recipe
    plan: Plan
    settings: Settings
    selected: Tensor
    round: int = 0
    facts: Mapping[str, Tensor] = field(default_factory=dict)
    """Facts about its own data that the client half declares to use (`ClientRule.knows`): [n] each, -1 where
    the partition records none."""
    memory: OptimizerMemory | None = None
    """The optimisers' states that these clients keep from round to round, where they do."""

    passes: Tensor | None = None
    """Under DP-SGD: int64 [n, 2], passes over the data and steps of all models that were trained so far."""

    @property
    def n(self) -> int:
        return len(self.ids)

    @cached_property
    def count(self) -> Tensor:
        """The number of training samples of each client."""
        return self.data.count

    def fit(self, model: Tensor, *, purpose: str = "fit", **options: Any) -> Fitted:
        """Train models [r * n, size]; options are those of `fit` (pull, trainable, aux, step) and of `Recipe`
        (lr, epochs, loss, optimizer ...). A call with a learning rate of its own does not follow the schedule
        over steps."""
        asked = {name: options.pop(name) for name in list(options) if name in Recipe.__dataclass_fields__}
        if "epochs" in asked:  # a call that asks for epochs overrides the experiment's local_steps
            asked.setdefault("steps", None)
        if "lr" in asked:
            asked.setdefault("schedule", None)
        recipe, key, before = replace(self.recipe, **asked), self.key.fold(purpose), None
        if options.get("step") is not None:
            if "lr" not in asked:
                _check_own_step(recipe)
        elif recipe.optimizer.persist and self.memory is not None:
            before = self.memory.before(purpose, len(model), self.n)
        fitted = fit(
            self.network, model, self.samples, self.data, key, recipe, self.plan, state=before, **options
        )
        if before is not None and self.memory is not None:
            self.memory.after(purpose, fitted.state)
        if self.passes is not None:
            self.passes.add_(passes_of(fitted.steps, self.count, recipe))
        return fitted

    @property
    def plain_sgd(self) -> dict[str, Any]:
        """Options of `fit` for plain gradient steps, whatever optimiser the experiment has."""
        return {
            "optimizer": Sgd(),
            "momentum": 0.0,
            "weight_decay": 0.0,
            "clip_gradient": None,
            "schedule": None,
        }

    def report(self, model: Tensor, received: Received, fitted: Fitted) -> dict[str, Tensor]:
        """The usual reply of a training task: the update of what travels, its buffers, the sample count and
        the loss."""
        sent = self.wire.pack(model)
        p = self.wire.parameters
        return {
            "update": sent[:, :p] - received.model[:, :p],
            "buffers": sent[:, p:],
            "count": self.count.to(sent.dtype),
            "loss": fitted.loss[: self.n].to(sent.dtype),
        }


def passes_of(steps: Tensor, count: Tensor, recipe: Recipe) -> Tensor:
    """int64 [n, 2]: how often a training went through each client's samples, begun passes included, and how
    many steps it took, for all models [r * n] together."""
    each = steps.cpu().view(-1, len(count))
    whole = count.cpu() // recipe.batch_size
    per_pass = (whole if recipe.drop_last else -(-count.cpu() // recipe.batch_size)).clamp(min=1)
    return torch.stack([-(-each // per_pass), each], -1).sum(0)


def _check_own_step(recipe: Recipe) -> None:
    """Refuse an optimiser or a bound that a step of the method's own would ignore."""
    name = "train.clip_gradient" if recipe.clip_gradient is not None else "optimizer"
    if recipe.clip_gradient is not None or not isinstance(recipe.optimizer, Sgd):
        raise ConfigError(
            f"{name}: this method takes steps of its own, which would ignore it; leave it out (a method"
            " says so in `refuses` of its client half)"
        )


def rows_of(state: State, rows: Tensor) -> State:
    return {name: value[rows] for name, value in state.items()}


def stack_states(states: list[Mapping[str, Tensor]]) -> State:
    """States of several groups of clients as one, row after row."""
    return {name: torch.cat([state[name] for state in states]) for name in states[0]} if states else {}
