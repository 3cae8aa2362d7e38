"""Free riders: clients that want the model and have nothing to give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.attacks.base import Attack, View
from holdfast.attacks.received import Received
from holdfast.attacks.several import Views
from holdfast.attacks.shared_rows import normal, root_mean_square, spread
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink


@register(
    "attack",
    "free-rider",
    paper=(
        "Fraboni, Vidal and Lorenzi: Free-rider Attacks on Model Aggregation in Federated Learning, AISTATS"
        " 2021"
    ),
)
class FreeRider(Attack):
    """Sends no training: zeros, noise, or what the model itself moved by since it was last received.

    `what = "zeros"` sends the model back as it came, `"noise"` with Gaussian noise of sigma * t^-decay in
    round t (Fraboni et al.: plain and disguised free-riding); with no sigma, it is the standard deviation of
    the numbers of the first difference of two received models. `"delta"` sends the last difference of two
    received models, with noise in proportion to it (Lin, Du and Liu: Free-riders in Federated Learning:
    Attacks and Defenses, 2019: delta weights). Until two models were received, and on class means, these are
    zeros. A free rider remembers one model."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends zeros, noise, or the last change of the model, without training",
        "settings, with their defaults": '`what = "zeros"`, `sigma`: estimated, `decay = 1`, `noise = 0.1`',
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "gram"
    what: Literal["zeros", "noise", "delta"] = setting("zeros", "what is sent in place of an update")
    sigma: float | None = setting(None, "noise: its size in the first round; none: estimated", ge=0)
    decay: float = setting(1.0, "noise: the exponent by which it decays over rounds", ge=0)
    noise: float = setting(0.1, "delta: size of its noise, in root mean squares of the difference", ge=0)

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        out = {}
        for name in self.targets(schema):
            own, luck = view.own(name), key.fold(name).fold(up.ids[None])
            out[name] = self._ridden(Received(view, task, name, own), luck, own[None])[0]
        return out

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        out = {}
        for name in self.targets(schema):
            own, luck = views.own(name), views.key.fold(name).fold(views.ids)
            out[name] = self._ridden(Received(views, task, name, own), luck, own)
        return out

    def _ridden(self, received: Received, luck: Key, own: Tensor) -> Tensor:
        """[c, attackers or 1, d]."""
        nothing = torch.zeros_like(own[:, :1])
        if self.what == "zeros" or received.model is None:
            return nothing
        moved = self._moved(received)
        if self.what == "delta":
            if moved is None:
                return nothing
            return moved[:, None] + self.noise * root_mean_square(moved)[:, None] * _noise(luck, own)
        sigma = self._sigma(received, moved)
        if sigma is None:
            return nothing
        decayed = to_device(received.rounds**-self.decay, own.device) * sigma
        return decayed.to(own.dtype)[:, None] * _noise(luck, own)

    def _moved(self, received: Received) -> Tensor | None:
        """[c, d]: the model that was sent less the one received before it."""
        assert received.model is not None
        before = received.recall("model")
        received.remember("model", received.model, columns=True)
        return None if before is None else received.model - before

    def _sigma(self, received: Received, moved: Tensor | None) -> Tensor | None:
        """[c, 1]: the size of the noise in the first round, as far as it is known."""
        if self.sigma is not None:
            return torch.full_like(received.rounds, self.sigma)
        known = received.recall("sigma")
        if known is None and moved is not None:
            known = spread(moved.double())
            received.remember("sigma", known)
        return known


def _noise(luck: Key, own: Tensor) -> Tensor:
    """[c, attackers, d]."""
    return normal(Key(to_device(luck.bits, own.device)), own.shape[-1], dtype=own.dtype)
