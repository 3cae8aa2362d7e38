"""Attackers that train in their own way, before they answer.

What every attack here has in common: the attackers of an exchange begin with the model that they were sent,
train it on their own data with a loss, a mask, a projection, epochs and a learning rate of their own, and
send that in place of the honest update; where only a part of the model travels, they train and send that
part. It is done for every exchange that asks for an update, of every method, and costs time for the attackers
only. The method's honest client half is performed too, on the attackers' (poisoned) data: it leaves their
private rows and all else that they send, and `view.own` has its update. Private rows never see the attackers'
own training.

How to write one (a complete example is `tests/attacks/searched_trigger.py`):

* `lead(crew)` is what attackers that act together do in an exchange, in order. It yields an `Ask` for each
  piece of work that every one of them performs on its own data, and is sent what they found, one row each. It
  may look at the models that they were sent (`crew.sent()`), recall and remember (memory.py). By default it
  asks once for `poisoned`.
* The work of an `Ask` is a method of the attack with the name of its task: `poisoned(own)`. It is given an
  `Own`: the models, the data before and after it was poisoned, what the leader handed out (`own.given`), and
  returns tensors with one row for each attacker. Attackers of several experiments may be in one stack, so it
  must treat all rows alike, as a client half does: plain numbers come from the attack's settings, everything
  else is a row. All training is `own.fit`, so it holds for every plan. `own.report(model)` is what travels of
  the models.

A trigger that attackers train by themselves: `own.fit_tensors({"trigger": rows}, loss, ...)` trains tensors
that the loss finds as `net.trigger`, by steps through their models, which stay as they are; for signed or
projected steps give it `step`. The leader combines what they found, remembers it and hands it to the next
`Ask`; `poisoned` passes it to the loss as `aux`, which stamps the batch. How it is measured says
moving_trigger.py."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast.attacks.base import Attack, View
from holdfast.attacks.memory import Memory
from holdfast.attacks.several import Views
from holdfast.core.columns import Reads
from holdfast.core.keys import Key
from holdfast.core.types import Exchange, Schema, Uplink
from holdfast.data.client_rows import Padded
from holdfast.local.client import Local, Received
from holdfast.local.fit import Fitted
from holdfast.models.widened import widened


@dataclass(frozen=True)
class Ask:
    """Work for each of the attackers that act together, on its own data."""

    task: str = "poisoned"
    """The name of the attack's method that does it."""
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    """What all of them are handed."""
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """What each is handed: one row for each, in the order of their ids."""

    def exchange(self, asked: Exchange) -> Exchange:
        """The request to these attackers with what they are handed."""
        n = len(asked.to)
        handed = {name: value.expand(n, *value.shape) for name, value in self.shared.items()}
        return replace(asked, extra={**handed, **self.rows})


Leading = Generator[Ask, Uplink, Uplink]


@dataclass(frozen=True)
class Crew:
    """Attackers that act together in an exchange, before they answer: all of them, or one that knows only
    itself."""

    attack: Attack
    asked: Exchange
    """What the server asked of them, and of nobody else."""
    cohort: int
    """How many clients were asked."""
    round: int
    key: Key
    owner: str
    memory: Memory

    @property
    def ids(self) -> Tensor:
        return self.asked.to

    def sent(self) -> Tensor | None:
        """[size]: the model that they were sent, as it travels; the mean where each was sent another one.
        None where they were sent none."""
        picks = self.asked.pick[:, :1].flatten()
        if not len(picks) or bool((picks < 0).any()):
            return None
        which, counts = picks.unique(return_counts=True)
        models = self.asked.bank[which]
        if len(which) == 1:
            return models[0]
        return (counts / counts.sum()).to(models) @ models

    def recall(self, name: str) -> Tensor | None:
        return self.memory.recall(name)

    def remember(self, name: str, value: Tensor) -> None:
        """Remember a tensor for later asks, for `uplink` and for later rounds. Where several processes share
        the updates, it must be a whole one: everything is but a field of the name "update"."""
        self.memory.remember(name, value)


@dataclass(frozen=True)
class Own:
    """What attackers work with: a stack with one row for each of them."""

    local: Local
    """As a client half has it: ids, keys, samples, the experiment's recipe. `local.data` is poisoned."""
    received: Received
    model: Tensor
    """[n, size]: the whole models that they begin with: what was sent, beside what each client keeps."""
    base: Tensor
    """[n, what travels]: the models from which the server counts their updates."""
    clean: Padded
    """Their data before it was poisoned."""
    given: Mapping[str, Tensor]
    """What the leader handed out, one row each."""

    @cached_property
    def travels(self) -> Tensor:
        """bool[size]: what travels of a model."""
        mask = torch.zeros(self.local.network.layout.size, dtype=torch.bool)
        mask[self.local.wire.index.cpu()] = True
        return mask

    @cached_property
    def poisoned(self) -> Padded:
        """Those of their samples that were changed, by input or by label."""
        mine, clean = self.local.data, self.clean
        if mine.rows.shape != clean.rows.shape or not torch.equal(mine.count, clean.count):
            return mine
        return picked(mine, ((mine.rows != clean.rows) | (mine.labels != clean.labels)) & mine.mask)

    def fit(self, model: Tensor | None = None, data: Padded | None = None, **options: Any) -> Fitted:
        """Train models (by default from those sent), on their poisoned data or on other samples. Options are
        those of `Local.fit`; by default what travels is trained."""
        local = self.local if data is None else replace(self.local, data=data)
        return local.fit(self.model if model is None else model, **{"trainable": self.travels, **options})

    def fit_tensors(
        self,
        start: Mapping[str, Tensor],
        loss: Callable[..., Tensor],
        model: Tensor | None = None,
        data: Padded | None = None,
        **options: Any,
    ) -> dict[str, Tensor]:
        """Train tensors [n, ...] of their own, one row each, by steps through their models, which stay as
        they are: the loss finds them as attributes of `net`, by name. Plain gradient steps, unless options of
        `Local.fit` say otherwise."""
        local = self.local if data is None else replace(self.local, data=data)
        wide = widened(local.network, {name: tuple(value.shape[1:]) for name, value in start.items()})
        models = self.model if model is None else model
        begin = torch.cat([*(value.flatten(1).to(models) for value in start.values()), models], 1)
        trained = wide.layout.mask(lambda slot: slot.name in start)
        options = {**local.plain_sgd, "purpose": "tensors", "trainable": trained, **options}
        fitted = replace(local, network=wide).fit(begin, loss=loss, **options)
        found = wide.layout.unflatten(fitted.model)
        return {name: found[name] for name in start}

    def report(self, model: Tensor) -> dict[str, Tensor]:
        """What travels of these models: the update, and buffers."""
        sent, p = self.local.wire.pack(model), self.local.wire.parameters
        return {"update": sent[:, :p] - self.base[:, :p], "buffers": sent[:, p:]}


def picked(table: Padded, chosen: Tensor) -> Padded:
    """The chosen samples of each client, in their order; `chosen` is bool[n, m]."""
    count = chosen.sum(1).cpu()
    return table.drawn((~chosen).long(), torch.zeros_like(count), count)


class OwnTraining(Attack):
    """An attack whose clients train in their own way; see the text at the top of this file. Class means are
    sent as honest training leaves them."""

    kinds: ClassVar[frozenset[str]] = frozenset({"update", "buffer"})
    reads: ClassVar[Reads] = "sum"

    def features_in(self, schema: Schema) -> list[str]:
        return []

    def lead(self, crew: Crew) -> Leading:
        """What these attackers do before they answer. Returns what they send: rows of fields of the reply."""
        return (yield Ask())

    def poisoned(self, own: Own) -> Mapping[str, Tensor]:
        """Their training: rows of what they send."""
        raise TypeError(f"{type(self).__name__} does not define how its clients train")

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        return _there({name: view.trained(name) for name in self.targets(schema)})

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        return _there({name: views.trained(name) for name in self.targets(schema)})


def _there(trained: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Nothing where they did not train by themselves: then they send honest rows."""
    return {name: value for name, value in trained.items() if value is not None}
