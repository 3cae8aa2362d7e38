"""Inner product manipulation: against the direction of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from holdfast.aggregators.geometry import mean
from holdfast.attacks.base import Attack, Knowledge, View
from holdfast.attacks.several import Views
from holdfast.core.columns import Reads
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink


@register("attack", "ipm", paper="Xie, Koyejo and Gupta: Fall of Empires, UAI 2019")
class Ipm(Attack):
    """Sends -eps times the mean of the benign updates.

    With eps above benign / attackers, the mean of all points backwards. FedCAP's eps is the size of the
    cohort."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends -eps times the mean of the benign updates",
        "settings, with their defaults": "`eps`: the size of the cohort",
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "sum"
    least: ClassVar[Knowledge] = "colluders"
    knows: Knowledge = setting(
        "everyone", "updates from which the benign mean is taken: colluders (their own), everyone"
    )
    eps: float | None = setting(
        None, "factor on the mean; none: the size of the cohort; the attack's paper has 0.1 to 10", ge=0
    )

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        eps = view.cohort if self.eps is None else self.eps
        return {name: -eps * mean(view.known(name, "benign")) for name in self.targets(schema)}

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        eps = views.cohort if self.eps is None else self.eps
        return {
            name: -eps * views.known(name, "benign").mean(1, keepdim=True) for name in self.targets(schema)
        }
