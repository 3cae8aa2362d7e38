"""Noise in place of an update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor

from holdfast.attacks.base import Attack, View
from holdfast.attacks.several import Views
from holdfast.attacks.shared_rows import normal, spread
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.errors import RunError
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink


@register(
    "attack",
    "gaussian",
    paper="Han et al.: Towards Attack-tolerant Federated Learning via Critical Parameter Analysis, ICCV 2023",
)
class Gaussian(Attack):
    """Sends Gaussian noise in place of the update.

    FedCPA's released code draws it in proportion to the spread of the model's own numbers: `scale = "model"`.
    There the counters of BatchNorm are among these numbers; here only parameters are."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends noise",
        "settings, with their defaults": '`sigma = 0.05`, `scale = "absolute"`',
    }
    tasks: ClassVar[None] = None
    sigma: float = setting(0.05, "standard deviation of the noise", ge=0)
    scale: Literal["absolute", "model"] = setting(
        "absolute", "model: sigma is in standard deviations of the parameters that were sent"
    )

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        return "gram" if self.scale == "model" else "columns"

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        out = {}
        for name in self.targets(schema):
            own = view.own(name)
            luck = key.fold(name).fold(up.ids).to(own.device)
            out[name] = normal(luck, *own.shape[1:], dtype=own.dtype) * self._sigma(own, view)
        return out

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        out = {}
        for name in self.targets(schema):
            own = views.own(name)
            luck = views.key.fold(name).fold(views.ids).bits
            noise = Key(to_device(luck, own.device)).normal(*own.shape[2:], dtype=own.dtype)
            out[name] = noise * self._sigma(own, views)
        return out

    def _sigma(self, own: Tensor, view: View | Views) -> float | Tensor:
        if self.scale == "absolute":
            return self.sigma
        sent = view.sent()
        if sent is None:
            raise RunError(
                "attack 'gaussian' scales its noise by the model that was sent, but none was; set"
                ' attack.scale = "absolute"'
            )
        return self.sigma * spread(sent[..., : own.shape[-1]].double()).to(own)
