"""The attacks of Shejwalkar and Houmansadr that are tailored to the server's rule (NDSS 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor

from holdfast.attacks.against_rule import EVALUATIONS, STEP, farthest_chosen, most_harmful
from holdfast.attacks.base import Attack, Knowledge, View
from holdfast.attacks.distances import Perturbation, line
from holdfast.attacks.target import Trial
from holdfast.core.columns import Reads
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink

_CHOOSING = ("krum", "multi-krum", "bulyan")
_ALONE = "agr-tailored: fewer than two benign updates are known, so attackers send their own"


@register("attack", "agr-tailored", paper="Shejwalkar and Houmansadr: Manipulating the Byzantine, NDSS 2021")
class AgrTailored(Attack):
    """Sends mean + gamma * p from all attackers, with the gamma that does most harm to the server's own rule.

    The rule is tried with its settings and wrappers on the benign updates and the attackers' candidates.
    Krum, multi-Krum and Bulyan: the largest gamma at which the rule still chooses them (Krum one of them, the
    others all). Any other rule, and these inside a wrapper: the gamma at which the aggregate lies farthest
    from the benign mean, as the paper has it for the trimmed mean and the median. The paper halves a step
    from a first gamma on (Algorithm 1), which finds no gamma above twice that, and compares a deviation with
    that of the value tried before; here steps from 0 on are doubled first, and a deviation is compared with
    the best. The rule is tried `evaluations` times in a round. Memory, root data and random draws of the rule
    are not known: `holdfast.attacks.target.Trial` says what takes their place."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends mean + gamma p, with the worst gamma for the server's rule",
        "settings, with their defaults": (
            '`perturbation = "std"`, `goal = "auto"`, `evaluations = 20`, `step = 1`'
        ),
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "gram"
    least: ClassVar[Knowledge] = "defence"
    knows: Knowledge = setting("defence", "defence only: it tries the server's rule on everyone's updates")
    perturbation: Perturbation = setting(
        "std", "p: minus the spread, minus the mean's direction, or minus its signs"
    )
    goal: Literal["auto", "chosen", "deviation"] = setting(
        "auto", "chosen: be chosen by the rule; deviation: move the aggregate; auto: by the rule"
    )
    evaluations: int = setting(20, EVALUATIONS, ge=1)
    step: float = setting(1.0, STEP, gt=0)

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        out = {}
        for name in self.targets(schema):
            known = view.known(name, "benign")
            if len(known) < 2:
                view.note(_ALONE)
                continue
            way, trial = line(known, self.perturbation), view.trial(name, key.fold(name))
            search = farthest_chosen if self._chooses(trial) else most_harmful
            out[name] = search(trial, way.mean, way.direction, self.evaluations, self.step)
        return out

    def _chooses(self, trial: Trial) -> bool:
        rule, around = trial.rule.layers()
        enough = trial.rule.enough(trial.clients)
        tailored = rule.name in _CHOOSING and not around and enough
        return tailored if self.goal == "auto" else self.goal == "chosen"
