"""An attack whose updates are infinite."""

from __future__ import annotations

import torch

from holdfast.attacks.base import Attack, View
from holdfast.core.keys import Key
from holdfast.core.types import Schema, Uplink


class Endless(Attack):
    """Sends what no model can take."""

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> dict[str, torch.Tensor]:
        return {"update": torch.full_like(up["update"], torch.inf)}
