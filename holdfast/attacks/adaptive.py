"""An attack that knows FedCAP's rule: its update is as long as the norm test allows, and aligned enough with
the mean to get weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators import geometry
from holdfast.attacks.base import Attack, Knowledge, View
from holdfast.attacks.distances import deviations
from holdfast.attacks.several import Views
from holdfast.attacks.shared_rows import inner, length, normal
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink


@register("attack", "adaptive")
class Adaptive(Attack):
    """Sends the longest harmful update that FedCAP's norm test accepts.

    It points where benign updates differ most, and is turned towards their mean just enough to be given
    weight. FedCAP bans updates longer than T_norm and weighs the others by the softmax of their cosines; the
    paper leaves open how an attacker could use that. This is a simple answer. With m the unit mean of the
    benign updates and h the unit vector of minus their spread, made orthogonal to m, it sends (1 - margin) *
    t_norm * (align * m + sqrt(1 - align^2) * h): the largest length that is not banned, nearly all of it
    harmful, with a cosine of `align` to the mean. Where the server calibrates against another model than the
    client was sent, lengths change a little: that is what the margin is for."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends the longest harmful update that FedCAP's norm test accepts",
        "settings, with their defaults": "`t_norm = 10`, `margin = 0.05`, `align = 0.3`",
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "gram"
    least: ClassVar[Knowledge] = "defence"
    knows: Knowledge = setting("defence", "defence only: it uses everyone's updates and the rule")
    t_norm: float = setting(10.0, "length above which the defence bans", gt=0)
    margin: float = setting(0.05, "distance below that length, as a share of it", ge=0, lt=1)
    align: float = setting(0.3, "cosine with the mean of the benign updates", ge=-1, le=1)

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        return {
            name: self._update(view.known(name, "benign"), key.fold(name)) for name in self.targets(schema)
        }

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        return {
            name: self._updates(views.known(name, "benign"), views.key.fold(name))[:, None]
            for name in self.targets(schema)
        }

    def _updates(self, benign: Tensor, key: Key) -> Tensor:
        """`_update` for [c, n, d]."""
        mean = _unit(benign.mean(1).double())
        spread = deviations(benign).double() if benign.shape[1] > 1 else torch.zeros_like(mean)
        harm = _across(-_unit(spread), mean)
        alike = (harm.norm(dim=1) < 1e-6).cpu()
        if bool(alike.any()):
            rows = to_device(alike.nonzero().flatten(), harm.device)
            bits = to_device(key.bits[alike, 0], harm.device)
            luck = Key(bits).normal(mean.shape[1], dtype=torch.float64)
            harm[rows] = _across(_unit(luck), mean[rows])
        direction = self.align * mean + math.sqrt(1 - self.align**2) * _unit(harm)
        return ((1 - self.margin) * self.t_norm * direction).to(benign.dtype)

    def _update(self, benign: Tensor, key: Key) -> Tensor:
        mean = _unit(geometry.mean(benign).double())
        spread = geometry.deviation(benign).double() if len(benign) > 1 else torch.zeros_like(mean)
        harm = _across(-_unit(spread), mean)
        if float(length(harm)) < 1e-6:
            # the updates are equal, or differ only along the mean: any direction orthogonal to it is harmful
            luck = normal(key.to(mean.device), len(mean), dtype=torch.float64)
            harm = _across(_unit(luck), mean)
        direction = self.align * mean + math.sqrt(1 - self.align**2) * _unit(harm)
        return ((1 - self.margin) * self.t_norm * direction).to(benign.dtype)


def _unit(x: Tensor) -> Tensor:
    """Of a vector, or of each row."""
    return x / (length(x) if x.ndim == 1 else x.norm(dim=1, keepdim=True)).clamp(min=1e-300)


def _across(x: Tensor, axis: Tensor) -> Tensor:
    """Return the part of x that is orthogonal to the axis."""
    return x - (inner(x, axis) if x.ndim == 1 else (x * axis).sum(1, keepdim=True)) * axis
