"""MPAF: fake clients that pull the model towards a model of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.attacks.base import Attack, View
from holdfast.attacks.several import Views
from holdfast.core.columns import Reads, current
from holdfast.core.device import to_device
from holdfast.core.flat import Layout
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink


@register(
    "attack",
    "mpaf",
    paper=(
        "Cao and Gong: MPAF: Model Poisoning Attacks to Federated Learning based on Fake Clients, CVPR"
        " Workshops 2022"
    ),
)
class Mpaf(Attack):
    """Sends factor * (base - model that was sent), with one random base model for the whole run.

    Fake clients need neither data nor anybody's updates: all of them point to the same base model, in every
    round, so that what they do adds up. The base has the network's layers: matrices and kernels are uniform
    within 1 / sqrt(fan-in), as PyTorch begins them, vectors are 0. The paper's factor (its lambda) is 10^6;
    against rules that cut off what is long, it only matters that it is large. Where no model was sent, and on
    class means, the base itself is sent times the factor."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends factor times the way from the model to one random model",
        "settings, with their defaults": "`factor = 1e6`",
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "columns"
    factor: float = setting(1e6, "factor on the difference (the paper's lambda)", gt=0)

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        out, sent = {}, view.sent()
        for name in self.targets(schema):
            own = view.own(name)
            base = base_model(view.layout(name), view.lasting.fold(name), own)
            out[name] = self._pull(base[None], sent, own)
        return out

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        out, sent = {}, views.sent()
        for name in self.targets(schema):
            own = views.own(name)
            found: dict[int, Tensor] = {}  # attackers who act alone in one experiment share the base
            keys = [situation.lasting.fold(name) for situation in views.situations]
            for key, situation in zip(keys, views.situations, strict=True):
                if int(key.bits) not in found:
                    layout = situation.target.layout_of(own.shape[-1])
                    found[int(key.bits)] = base_model(layout, key, own)
            base = torch.stack([found[int(key.bits)] for key in keys])
            out[name] = self._pull(base[:, None], sent, own)
        return out

    def _pull(self, base: Tensor, sent: Tensor | None, own: Tensor) -> Tensor:
        away = base if sent is None else base - sent[..., : own.shape[-1]]
        return (self.factor * away).to(own.dtype)


def base_model(layout: Layout, key: Key, like: Tensor) -> Tensor:
    """[d], in the columns that this process has: random parameters for these layers."""
    parts = []
    for slot in layout.slots:
        size, shape = slot.stop - slot.start, slot.shape
        bound = 1 / math.sqrt(max(1, math.prod(shape[1:]))) if len(shape) > 1 else 0.0
        drawn = key.fold(slot.name).uniform(size, dtype=torch.float64)
        parts.append((2 * drawn - 1) * bound)
    whole, shared = torch.cat(parts).to(like.dtype), current()
    return to_device(whole if shared is None else shared.mine(whole), like.device)
