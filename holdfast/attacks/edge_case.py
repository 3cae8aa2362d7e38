"""Edge-case backdoors: rare inputs of one class, labelled as another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from holdfast.aggregators.geometry import norms
from holdfast.attacks.base import Attack, Trigger, View
from holdfast.attacks.data_poisoning import chosen, owners
from holdfast.attacks.planting import check_class
from holdfast.attacks.several import Views
from holdfast.core.columns import Reads
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink
from holdfast.data.federation import Federation, Samples

_AT_ONCE = 1024
_BUCKETS = 512  # columns into which the words of a text are counted


@register(
    "attack",
    "edge-case",
    paper="Wang et al.: Attack of the Tails: Yes, You Really Can Backdoor Federated Learning, NeurIPS 2020",
)
class EdgeCase(Attack):
    """Trains on rare inputs of a class that are labelled as another class, beside its own samples. There is
    no trigger: the attack succeeds where a deployed model calls such inputs of benign clients the target.

    The paper takes inputs from outside the dataset (aeroplanes of one airline, digits in another hand). Here
    they come from the dataset: of the samples of class `source` in its train split, the share `tail` that is
    farthest from their mean, as the model's inputs are normalised (the least likely ones under a Gaussian
    with one variance; of texts, counts of words in 512 buckets, divided by the length). Test samples of the
    class that are as far away are what `attack/asr` is measured on, which is null where benign clients have
    none. With `origin = "dataset"` attackers draw from these samples, without those on which anybody is
    tested, as if they had collected them elsewhere; benign clients may hold some of them, rightly labelled
    (the paper's p-edge-case). With `origin = "own"` an attacker has only the tail of its own samples of the
    class, and is honest where it has none of the class.

    The model is sent by the paper's three ways: as it is (black box); projected onto a ball around the model
    that was received (`radius`; PGD, here with one projection after local training, not one after
    each epoch); and multiplied (`factor`), which with the size of the cohort is PGD with model
    replacement."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "trains on the rarest samples of a class, labelled as the target",
        "settings, with their defaults": (
            '`source = 0`, `target = 1`, `tail = 0.1`, `origin = "dataset"`, `ratio = 0.5`, `radius`: none,'
            " `factor = 1`"
        ),
    }
    reads: ClassVar[Reads] = "gram"
    source: int = setting(0, "the class whose rare samples are mislabelled", ge=0)
    target: int = setting(1, "the class that they are labelled as", ge=0)
    tail: float = setting(0.1, "share of the class that counts as rare", gt=0, le=1)
    origin: Literal["dataset", "own"] = setting(
        "dataset", "where attackers have them from: the dataset's train split, or each its own samples"
    )
    ratio: float = setting(0.5, "share of an attacker's samples that are replaced by them", ge=0, le=1)
    radius: float | None = setting(None, "largest length of an update before `factor`; none: any", gt=0)
    factor: float = setting(1.0, "factor on the update that is sent", gt=0)

    @property
    def kinds(self) -> frozenset[str]:  # type: ignore[override]
        """It sends what it trained, unless it is shortened or multiplied."""
        return frozenset({"update"} if self.radius is not None or self.factor != 1 else ())

    @model_validator(mode="after")
    def _two_classes(self) -> EdgeCase:
        if self.source == self.target:
            raise ValueError("source and target are the same class; name two")
        return self

    def data(self, federation: Federation, malicious: Tensor, key: Key) -> Federation:
        table, samples = federation.train, federation.samples
        places = chosen(table, malicious, self.ratio, key)
        row, label, owner = table.row.clone(), table.label.clone(), owners(table)[places]
        rare = self._collected(federation) if self.origin == "dataset" else None
        changed = False
        for client in malicious.tolist():
            mine = rare if rare is not None else self._own(samples, *table.client(client))
            spots = places[owner == client]
            if len(mine) and len(spots):
                order = mine[torch.argsort(key.fold("edge", client).hash(len(mine)), stable=True)]
                row[spots], label[spots], changed = (
                    order[torch.arange(len(spots)) % len(mine)],
                    self.target,
                    True,
                )
        if len(places) and not changed:
            raise ConfigError(
                f"attack.source: no attacker has samples of class {self.source}; name another class, or set"
                ' attack.origin = "dataset"'
            )
        return replace(federation, train=replace(table, row=row, label=label))

    def planted(self, samples: Samples) -> Trigger:
        return Trigger(torch.clone, self.target, False, self._is_rare(samples))

    def _collected(self, federation: Federation) -> Tensor:
        """Rare rows of the train split on which nobody is tested."""
        samples = federation.samples
        rare = self._is_rare(samples)
        rare[samples.train_rows :] = False
        for table in (federation.validation, federation.test, federation.global_test, federation.root):
            rare[table.row] = False
        rows = rare.nonzero().flatten()
        if not len(rows):
            raise ConfigError(
                f"attack.tail: no rare sample of class {self.source} is left to train on; raise attack.tail,"
                ' or set attack.origin = "own"'
            )
        return rows

    def _is_rare(self, samples: Samples) -> Tensor:
        """bool for each row of the store: of class `source`, and as far from the class's mean as the `tail`
        of it in the train split."""
        check_class(self.source, "source", samples)
        check_class(self.target, "target", samples)
        rows = (samples.y == self.source).nonzero().flatten()
        known = rows < samples.train_rows
        if not bool(known.any()):
            raise ConfigError(f"attack.source: {samples.name} has no training sample of class {self.source}")
        far = distances_to_mean(samples, rows, rows[known])
        least = far[known].sort(descending=True).values[math.ceil(self.tail * int(known.sum())) - 1]
        out = torch.zeros(len(samples), dtype=torch.bool)
        out[rows[far >= least]] = True
        return out

    def _own(self, samples: Samples, rows: Tensor, labels: Tensor) -> Tensor:
        """The tail of an attacker's own samples of the class."""
        mine = rows[labels == self.source]
        if not len(mine):
            return mine
        far = distances_to_mean(samples, mine, mine)
        return mine[far.argsort(descending=True, stable=True)[: math.ceil(self.tail * len(mine))]]

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        return {name: self._sent(view.own(name)) for name in self.targets(schema)}

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        return {name: self._sent(views.own(name)) for name in self.targets(schema)}

    def _sent(self, update: Tensor) -> Tensor:
        """Shortened to the radius, and multiplied."""
        if self.radius is None:
            return self.factor * update
        shrink = (self.radius / norms(update)).nan_to_num(1.0).clamp(max=1.0)
        return (self.factor * shrink)[..., None].to(update.dtype) * update


def distances_to_mean(samples: Samples, rows: Tensor, of: Tensor) -> Tensor:
    """[n]: squared distances of samples to the mean of others, in float64, some at a time."""
    total: Tensor | int = 0
    for part in _inputs(samples, of):
        total = total + part.sum(0)
    mean = total / len(of)
    return torch.cat([(part - mean).square().sum(1) for part in _inputs(samples, rows)])


def _inputs(samples: Samples, rows: Tensor) -> Iterator[Tensor]:
    """[some, p]: samples as the model sees them; of texts the share of each bucket of words."""
    for part in rows.split(_AT_ONCE):
        x = samples.batch(part, torch.float64)
        if samples.words:
            words, real = x.remainder(_BUCKETS), (x != 0).double()
            counts = torch.zeros(len(x), _BUCKETS, dtype=torch.float64).scatter_add_(1, words, real)
            yield counts / real.sum(1, keepdim=True).clamp(min=1)
        else:
            yield x.flatten(1)
