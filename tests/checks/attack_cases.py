"""Every registered attack in every variant, and experiments that they attack, for tests that compare ways to
attack them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

from holdfast.attacks import Adversary, Attack
from holdfast.attacks.base import REACH
from holdfast.attacks.own_training import OwnTraining
from holdfast.attacks.target import Target
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.together import alone, in_lockstep
from holdfast.core.types import ROOT, Exchange, Field, Schema, Uplink
from tests.helpers import built_in

CLIENTS, EXPERIMENTS, LABELS = 7, 3, 3
QUICK: dict[str, dict[str, Any]] = {
    "a3fl": {"searches": 1},
    "alternating": {"epochs": 1},
    "bad-pfl": {"steps": 2, "width": 2},
    "chameleon": {"epochs": 1, "head_epochs": 1},
    "constrain-and-scale": {"epochs": 1},
    "iba": {"epochs": 1, "trigger_epochs": 1, "channels": 2},
    "neurotoxin": {"epochs": 1},
    "pfedba": {"by_loss": 2, "by_gradient": 1},
}
"""Attacks that train by themselves, in less time than by default."""


def variants(name: str) -> list[dict[str, Any]]:
    """The attack by its defaults and with each other choice of each setting, at each level of knowledge
    that makes a difference."""
    part = built_in("attack")[name]
    if issubclass(part, OwnTraining):  # which send what they trained, and share the code that does
        return [{"name": name, "knows": part.model_fields["knows"].default}]
    choices: list[dict[str, Any]] = [{}]
    for setting, field in part.model_fields.items():
        if setting != "knows" and get_origin(field.annotation) is Literal:
            others = [choice for choice in get_args(field.annotation) if choice != field.default]
            choices += [{setting: choice} for choice in others]
    if "evaluations" in part.model_fields:
        choices = [{**choice, "evaluations": 3} for choice in choices]  # each is an aggregation
    levels = [level for level in REACH if REACH[level] >= REACH[part.least]]
    if len(levels) > 1:
        levels.remove("defence")  # is shown what "everyone" is
    if part.least == "own":
        levels.remove("colluders")  # they act at once, as those who know everyone do
    # of what was sent, nothing is known where class means are attacked
    means = [{} if choice.get("scale") == "model" else {"features": True} for choice in choices]
    return [
        {"name": name, "knows": level, **choice, **more}
        for choice, more in zip(choices, means, strict=True)
        for level in levels
    ]


CASES = [case for name in built_in("attack") for case in variants(name)]
IDS = ["-".join(str(choice) for choice in case.values() if choice is not True) for case in CASES]
NAMED = [pytest.param(case, id=name) for case, name in zip(CASES, IDS, strict=True)]


def schema(d: int) -> Schema:
    return {
        "update": Field("update", (d,)),
        "count": Field("count", low=0),
        "prototypes": Field("feature", (LABELS, d)),
        "held": Field("count", (LABELS,), low=0),
    }


RULE = build("aggregator", {"name": "trimmed-mean", "f": 2})
"""What the attackers attack who know the defence."""


def adversary(attack: Attack, place: int) -> Adversary:
    """That of the experiment at this place."""
    made = Adversary(attack, torch.arange(CLIENTS), Key(place))
    made.target = Target(RULE)
    return made


class World:
    """Experiments with data and keys of their own; what their clients send lies in one memory."""

    def __init__(
        self, settings: Mapping[str, Any], d: int = 12, device: Any = "cpu", root: bool = True, **more: Any
    ):
        luck, rows = Key(5).fold("data"), CLIENTS + root
        ids = torch.arange(rows) + ROOT * root
        self.stack = luck.normal(EXPERIMENTS, rows, d, dtype=torch.float64) + torch.linspace(-1, 1, d)
        self.stack = self.stack.to(device)
        means = luck.fold("means").normal(EXPERIMENTS, rows, LABELS, d, dtype=torch.float64).to(device)
        held = luck.fold("held").hash(EXPERIMENTS, rows, LABELS).remainder(3).double()
        bank = luck.fold("bank").normal(2, d + 1, dtype=torch.float64).to(device)
        self.schema = schema(d)
        given = {"fraction": 0.3, "lies": {"count": "random"}, **settings, **more}
        self.attack: Attack = build("attack", given)
        self.adversaries = [adversary(self.attack, place) for place in range(EXPERIMENTS)]
        self.ups = [
            Uplink(
                ids,
                {
                    "update": self.stack[place],
                    "count": torch.arange(rows) + 1.0,
                    "prototypes": means[place],
                    "held": held[place],
                },
            )
            for place in range(EXPERIMENTS)
        ]
        self.trained = [self._trained(place) for place in range(EXPERIMENTS)]
        self.sent = Exchange("train", ids, bank, (torch.arange(rows) % 2)[:, None])

    def _trained(self, place: int) -> Uplink | None:
        """What the own training of the attackers left."""
        if not isinstance(self.attack, OwnTraining):
            return None
        ids = self.adversaries[place].malicious
        rows = Key(9).fold(place).fold(ids).normal(self.stack.shape[-1], dtype=torch.float64)
        return Uplink(ids, {"update": rows.to(self.stack.device)})

    def generators(self, **more: Any) -> list[Any]:
        found = []
        several = zip(self.adversaries, self.ups, self.trained, strict=True)
        for place, (adversary, up, trained) in enumerate(several):
            if trained is not None and up.columns is not None:
                trained = replace(
                    trained.having(update=up.columns.mine(trained["update"])), columns=up.columns
                )
            key = Key(7 + place)
            found.append(
                adversary.poisoning("train", self.schema, up, key, 0, self.sent, **more, trained=trained)
            )
        return found

    def one_by_one(self) -> list[Uplink]:
        return [alone(steps) for steps in self.generators()]

    def together(self, **more: Any) -> list[Uplink]:
        return in_lockstep(self.generators(**more), batch=True)

    def notes(self) -> list[list[str]]:
        return [adversary.take_notes() for adversary in self.adversaries]
