"""Mimic: nothing but honest updates, but always the same client's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.attacks.base import Attack, Knowledge, View
from holdfast.attacks.distances import line, lines
from holdfast.attacks.several import Views
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink

_ALONE = "mimic: no benign client is in the cohort, so attackers send their own"


@register(
    "attack",
    "mimic",
    paper="Karimireddy, He and Jaggi: Byzantine-Robust Learning on Heterogeneous Datasets, ICLR 2022",
)
class Mimic(Attack):
    """Sends a benign client's update from all attackers, so that its data counts many times.

    Nothing they send is unusual; under uneven data it still draws the model to one client. The paper picks,
    after some rounds of watching, the client that lies farthest along the direction in which updates differ
    most. This is its simple form, without memory: the first benign client of the cohort, which is the same in
    every round in which it takes part, or (`whom = "spread"`) the farthest one of this round. Alone in a
    cohort, attackers stay honest."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends one benign client's update",
        "settings, with their defaults": '`whom = "first"`',
    }
    tasks: ClassVar[None] = None
    least: ClassVar[Knowledge] = "everyone"
    knows: Knowledge = setting("everyone", "everyone or more, since it copies what another client sends")
    whom: Literal["first", "spread"] = setting(
        "first", "the benign client with the lowest id, or the one farthest along the main spread"
    )

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        return "gram" if self.whom == "spread" else "sum"

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        if len(view.mine) == len(view.up):
            view.note(_ALONE)
            return {}
        return {name: self._copied(view.known(name, "benign")) for name in self.targets(schema)}

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        if views.attackers == views.cohort:
            views.note(_ALONE)
            return {}
        return {name: self._copied_of_each(views.known(name, "benign")) for name in self.targets(schema)}

    def _copied_of_each(self, benign: Tensor) -> Tensor:
        c, n = benign.shape[:2]
        if self.whom == "first" or n < 2:
            return benign[:, :1]
        farthest = torch.tensor([_farthest(pairs) for pairs in lines(benign, "std").pairs])
        places = to_device(torch.arange(c) * n + farthest, benign.device)
        return benign.flatten(0, 1).index_select(0, places)[:, None]

    def _copied(self, benign: Tensor) -> Tensor:
        if self.whom == "first" or len(benign) < 2:
            return benign[0]
        return benign[_farthest(line(benign, "std").pairs)]


def _farthest(pairs: Tensor) -> int:
    """Which client lies farthest along the main spread, by squared distances between clients; the first where
    no update is finite."""
    if not bool(torch.isfinite(pairs).all()):
        return 0
    centred = (
        pairs - pairs.mean(0) - pairs.mean(1, keepdim=True) + pairs.mean()
    )  # -2 times the Gram matrix about the mean
    return int(torch.linalg.eigh(-centred / 2).eigenvectors[:, -1].abs().argmax())
