"""Sign flipping: the update turned around."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from holdfast.attacks.base import Attack, View
from holdfast.attacks.several import Views
from holdfast.core.columns import Reads
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink


@register(
    "attack", "sign-flip", paper="Li et al.: RSA: Byzantine-Robust Stochastic Aggregation Methods, AAAI 2019"
)
class SignFlip(Attack):
    """Sends the honest update turned around: -scale * update (FedCAP's SF)."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends -scale times its update",
        "settings, with their defaults": "`scale = 1`",
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "sum"
    scale: float = setting(1.0, "factor on the length of the update", gt=0)

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        return {name: -self.scale * view.own(name) for name in self.targets(schema)}

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        return {name: -self.scale * views.own(name) for name in self.targets(schema)}
