"""LIE with the number of standard deviations that does most harm to the server's actual rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.geometry import deviation
from holdfast.attacks.against_rule import EVALUATIONS, STEP, most_harmful
from holdfast.attacks.base import Attack, Knowledge, View
from holdfast.core.columns import Reads
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink

_ALONE = "optimal-lie: a single update is known, which has no spread, so it is sent as it is"


@register(
    "attack",
    "optimal-lie",
    paper=(
        "Allouah et al.: Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity, AISTATS"
        " 2023"
    ),
)
class OptimalLie(Attack):
    """Sends mean - z * std of the benign updates, with z >= 0 by a line search against the server's rule.

    z maximises the distance between the rule's aggregate and the benign mean (ByzFL's Optimal ALIE). The rule
    is the server's own, with its settings and wrappers; it is tried `evaluations` times in a round. ByzFL
    adds the spread where LIE takes it off, begins with a step of 10, and searches upwards only. What is not
    known of the rule: see `holdfast.attacks.target.Trial`."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends mean - z std, with the worst z for the server's rule",
        "settings, with their defaults": "`evaluations = 20`, `step = 1`",
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "gram"
    least: ClassVar[Knowledge] = "defence"
    knows: Knowledge = setting("defence", "defence only: it tries the server's rule on everyone's updates")
    evaluations: int = setting(20, EVALUATIONS, ge=1)
    step: float = setting(1.0, STEP, gt=0)

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        out = {}
        for name in self.targets(schema):
            known, trial = view.known(name, "benign"), view.trial(name, key.fold(name))
            if len(known) < 2:
                view.note(_ALONE)
            spread = deviation(known) if len(known) > 1 else torch.zeros_like(known[0])
            out[name] = most_harmful(trial, trial.benign, -spread, self.evaluations, self.step)
        return out
