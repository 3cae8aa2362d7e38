"""Model replacement: an update so long that it survives the average."""

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
    "attack", "replacement", paper="Bagdasaryan et al.: How To Backdoor Federated Learning, AISTATS 2020"
)
class Replacement(Attack):
    """Sends the honest update times the size of the cohort, so that a plain mean becomes it (FedCAP's MR)."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends its update times the size of the cohort",
        "settings, with their defaults": "`factor`: another number",
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "sum"
    factor: float | None = setting(None, "factor on the update; none: the size of the cohort")

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        factor = view.cohort if self.factor is None else self.factor
        return {name: factor * view.own(name) for name in self.targets(schema)}

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        factor = views.cohort if self.factor is None else self.factor
        return {name: factor * views.own(name) for name in self.targets(schema)}
