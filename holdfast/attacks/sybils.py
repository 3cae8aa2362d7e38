"""Sybils: one attacker under several names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.attacks.base import Attack, Knowledge, View
from holdfast.attacks.several import Views
from holdfast.attacks.shared_rows import normal, root_mean_square
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink


@register(
    "attack",
    "sybils",
    paper="Fung, Yoon and Beschastnikh: The Limitations of Federated Learning in Sybil Settings, RAID 2020",
)
class Sybils(Attack):
    """Sends one attacker's update, times `scale`, from all attackers, with small noise that cancels out.

    With u the honest update of the attacker with the lowest id, the attackers in the order of their ids send
    scale u + e_1, scale u - e_1, scale u + e_2, scale u - e_2 and so on; the last of an odd number sends
    scale u. e has `noise` times the root mean square of the numbers of scale u. The noise hides that updates
    are copies and does not change their sum: the paper's answer to FoolsGold (intelligent perturbation). Its
    sybils train on flipped labels; here they turn what they learnt around."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends the first attacker's update times `scale`, with small noise",
        "settings, with their defaults": "`scale = -1`, `noise = 0.01`",
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "gram"
    least: ClassVar[Knowledge] = "colluders"
    knows: Knowledge = setting("colluders", "updates that it uses: those of the attackers")
    scale: float = setting(-1.0, "factor on the update that is copied")
    noise: float = setting(0.01, "size of the noise, in root mean squares of that update", ge=0)

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        out = {}
        for name in self.targets(schema):
            first = view.colluders(name)[0]
            luck = key.fold(name).fold(up.ids[: len(up) // 2])
            out[name] = self._copies(first[None], luck, len(up))
        return out

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        out = {}
        for name in self.targets(schema):
            luck = views.key.fold(name).fold(views.ids[:, : views.attackers // 2])
            out[name] = self._copies(views.own(name)[:, :1], luck, views.attackers)
        return out

    def _copies(self, first: Tensor, luck: Key, attackers: int) -> Tensor:
        """[..., attackers, d] of [..., 1, d], with one key for each pair."""
        sent = self.scale * first
        e = normal(Key(to_device(luck.bits, sent.device)), sent.shape[-1], dtype=sent.dtype)
        e = e * (self.noise * root_mean_square(sent))
        pairs = torch.stack([e, -e], dim=-2).flatten(-3, -2)
        left = sent.new_zeros(*sent.shape[:-2], attackers % 2, sent.shape[-1])
        return sent + torch.cat([pairs, left], dim=-2)
