"""Updates that are not numbers: the simplest way to end a model for good where nobody looks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.attacks.base import Attack, View
from holdfast.attacks.several import Views
from holdfast.core.columns import Reads, current
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink

_NUMBERS = {"infinity": math.inf, "minus-infinity": -math.inf, "nan": math.nan}


@register("attack", "not-finite")
class NotFinite(Attack):
    """Sends infinite numbers, or NaN, in place of the update (ByzFL's Infinity).

    Screening refuses such a reply before any rule or detector sees it, so a round goes on without the
    attackers: this attack tests the screening. With `single`, one number of an otherwise honest update is
    not finite."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends numbers that are not finite, which screening refuses",
        "settings, with their defaults": '`value = "infinity"`, `single = false`',
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "columns"
    value: Literal["infinity", "minus-infinity", "nan"] = setting("infinity", "what stands in the update")
    single: bool = setting(False, "only in the first number; the others stay honest")

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        return {name: self._spoilt(view.own(name)) for name in self.targets(schema)}

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        return {name: self._spoilt(views.own(name)) for name in self.targets(schema)}

    def _spoilt(self, own: Tensor) -> Tensor:
        number = _NUMBERS[self.value]
        if not self.single:
            return torch.full_like(own, number)
        shared, out = current(), own.clone()
        if shared is None or shared.of_rank(shared.ranks.rank).start == 0:
            out[..., :1] = number
        return out
