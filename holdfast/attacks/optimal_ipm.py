"""Inner product manipulation with the factor that does most harm to the server's actual rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.attacks.against_rule import EVALUATIONS, STEP, most_harmful
from holdfast.attacks.base import Attack, Knowledge, View
from holdfast.core.columns import Reads
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink


@register(
    "attack",
    "optimal-ipm",
    paper=(
        "Allouah et al.: Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity, AISTATS"
        " 2023"
    ),
)
class OptimalIpm(Attack):
    """Sends -eps times the mean of the benign updates, with eps >= 0 by a line search against the server's
    rule.

    eps maximises the distance between the rule's aggregate and the benign mean (ByzFL's Optimal IPM). The
    rule is the server's own, with its settings and wrappers; it is tried `evaluations` times in a round.
    ByzFL begins with a step of 10, and searches upwards only. What is not known of the rule: see
    `holdfast.attacks.target.Trial`."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends -eps times the benign mean, with the worst eps for the server's rule",
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
            trial = view.trial(name, key.fold(name))
            nowhere = torch.zeros_like(trial.benign)
            out[name] = most_harmful(trial, nowhere, -trial.benign, self.evaluations, self.step)
        return out
