"""Fang's attack on the trimmed mean and the median: just beyond the benign values, on the side against the
model's way (Fang et al., USENIX Security 2020, section 3.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.geometry import deviation, mean
from holdfast.attacks.base import REACH, Attack, Knowledge, View
from holdfast.attacks.distances import deviations
from holdfast.attacks.several import Views
from holdfast.attacks.shared_rows import uniform
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink

PAPER = (
    "Fang et al.: Local Model Poisoning Attacks to Byzantine-Robust Federated Learning, USENIX Security 2020"
)
_ALONE = "fang-trim: a single update is known, which has no spread, so it is sent as it is"


@register("attack", "fang-trim", paper=PAPER)
class FangTrim(Attack):
    """Sends values beyond those of all benign clients, coordinate by coordinate, against the mean change.

    Made for the trimmed mean and the median. s is the sign of the mean update (the paper's changing
    direction; what the rule itself would give is taken for the mean, as in the released code). Full knowledge
    (`knows = "everyone"`): where s = 1, uniform between the smallest benign value and what is `b` times as
    far down (w / b where w > 0, else b w); where s = -1, between the largest and `b` times as far up. Partial
    knowledge (`knows = "colluders"`): uniform in mean - s [3, 4] spreads of the attackers' own honest
    updates. Every attacker and coordinate has its own draw; where s = 0 the mean is sent. The values w are
    those of the local models; `variant = "authors"` has those of the updates, as the released code, with
    extremes over all clients, attackers included, and the spread of a population."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends values just beyond all benign ones, against the mean change",
        "settings, with their defaults": "`b = 2`",
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "columns"
    least: ClassVar[Knowledge] = "colluders"
    knows: Knowledge = setting(
        "everyone", "everyone: the paper's full knowledge; colluders: its partial knowledge"
    )
    b: float = setting(2.0, "how far beyond the benign values, as a factor on them", gt=1)
    variant: Literal["paper", "authors"] = setting(
        "paper", "authors: factors on the updates, not on the models; extremes and spread as in the code"
    )

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        out, sent = {}, view.sent()
        for name in self.targets(schema):
            everyone, luck = view.known(name), self._luck(up[name], key.fold(name).fold(up.ids))
            if not self._sees_all():
                if len(everyone) < 2:
                    view.note(_ALONE)
                spread = deviation(everyone) if len(everyone) > 1 else torch.zeros_like(everyone[0])
                out[name] = self._outside(mean(everyone), spread, len(everyone), luck)
                continue
            start = self._start(sent, everyone)
            known = everyone if self.variant == "authors" else view.known(name, "benign")
            out[name] = self._beyond(mean(everyone), known, start, luck)
        return out

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        out, sent = {}, views.sent()
        for name in self.targets(schema):
            everyone = views.known(name)
            luck = self._luck(views.own(name), views.key.fold(name).fold(views.ids))
            n, middle = everyone.shape[1], everyone.mean(1)
            if not self._sees_all():
                if n < 2:
                    views.note(_ALONE)
                spread = deviations(everyone) if n > 1 else torch.zeros_like(middle)
                out[name] = self._outside(middle, spread, n, luck)
                continue
            start = self._start(sent, everyone)
            known = everyone if self.variant == "authors" else views.known(name, "benign")
            out[name] = self._beyond(middle, known, start, luck)
        return out

    def _sees_all(self) -> bool:
        return REACH[self.knows] >= REACH["everyone"]

    def _luck(self, own: Tensor, keys: Key) -> Tensor:
        """[..., attackers, d]: a uniform number for each attacker and coordinate."""
        return uniform(Key(to_device(keys.bits, own.device)), own.shape[-1], dtype=own.dtype)

    def _start(self, sent: Tensor | None, known: Tensor) -> Tensor:
        """[..., 1, d]: what is added to an update for the value whose factor is taken."""
        if sent is None or self.variant == "authors":
            return torch.zeros_like(known[..., :1, :])
        return sent[..., :1, : known.shape[-1]].to(known)

    def _beyond(self, middle: Tensor, known: Tensor, start: Tensor, luck: Tensor) -> Tensor:
        """[..., attackers, d] with full knowledge."""
        s = middle.sign()[..., None, :]
        low, high = (known.amin(-2, keepdim=True), known.amax(-2, keepdim=True))
        edge = start + torch.where(s > 0, low, high)
        far = torch.where(edge * s < 0, edge * self.b, edge / self.b)
        return torch.where(s == 0, middle[..., None, :], edge + luck * (far - edge) - start)

    def _outside(self, middle: Tensor, spread: Tensor, n: int, luck: Tensor) -> Tensor:
        """[..., attackers, d] with partial knowledge."""
        if self.variant == "authors":
            spread = spread * ((n - 1) / n) ** 0.5
        return middle[..., None, :] - middle.sign()[..., None, :] * spread[..., None, :] * (3 + luck)
