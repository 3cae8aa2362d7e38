"""A little is enough: as far from the mean as a benign client could be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.geometry import deviation, mean
from holdfast.attacks.base import Attack, Knowledge, View, Whom
from holdfast.attacks.distances import deviations
from holdfast.attacks.several import Views
from holdfast.core.columns import Reads
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink

_ALONE = "lie: a single update is known, which has no spread, so it is sent as it is"


@register("attack", "lie", paper="Baruch, Baruch and Goldberg: A Little Is Enough, NeurIPS 2019")
class Lie(Attack):
    """Sends mean - z * std of the honest updates, coordinate by coordinate.

    z is the paper's, from the numbers of clients and attackers in the cohort. It is infinite once attackers
    are the majority and below 0 when they are few; it is clamped to [0, z_max], and the round's record notes
    it. `variant = "authors"` is FedCAP's released code, which does not clamp: an infinite z makes updates
    that are not numbers, which screening refuses, so such a round has no attackers."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends mean - z std of the honest updates",
        "settings, with their defaults": '`z` by the formula, `z_max = 3`, `statistics = "all"`',
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "columns"
    least: ClassVar[Knowledge] = "colluders"
    knows: Knowledge = setting(
        "everyone", "updates from which mean and spread are taken: colluders, everyone"
    )
    z: float | None = setting(None, "number of standard deviations; none: by the paper's formula")
    z_max: float = setting(3.0, "upper bound on z, which the formula may exceed", ge=0)
    statistics: Whom = setting(
        "all", "mean and spread of all clients, attackers' honest updates included, or of benign ones only"
    )
    variant: Literal["paper", "authors"] = setting("paper", "authors: z is not clamped")

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        z, out = self._z(view, len(view.mine)), {}
        for name in self.targets(schema):
            known = view.known(name, self.statistics)
            if len(known) < 2:
                view.note(_ALONE)
            spread = deviation(known) if len(known) > 1 else torch.zeros_like(known[0])
            out[name] = mean(known) - z * spread
        return out

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        z, out = self._z(views, views.attackers), {}
        for name in self.targets(schema):
            known = views.known(name, self.statistics)
            if known.shape[1] < 2:
                views.note(_ALONE)
            spread = deviations(known) if known.shape[1] > 1 else torch.zeros_like(known[:, 0])
            out[name] = (known.mean(1) - z * spread)[:, None]
        return out

    def _z(self, view: View | Views, attackers: int) -> float:
        if self.z is not None:
            return self.z
        z = formula(view.cohort, attackers)
        if self.variant == "authors":
            if math.isinf(z):
                view.note(
                    f"lie: z = {z:g} for {attackers} attackers among {view.cohort} clients, so what they send"
                    " is not finite"
                )
            return z
        clamped = min(max(z, 0.0), self.z_max)
        if clamped != z:
            view.note(
                f"lie: z = {z:.3g} for {attackers} attackers among {view.cohort} clients, clamped to"
                f" {clamped:g}"
            )
        return clamped


def formula(clients: int, attackers: int) -> float:
    """The z at which enough benign clients lie farther out that attackers need no more than those to be a
    majority."""
    benign = clients - attackers
    needed = clients // 2 + 1 - attackers
    share = (benign - needed) / benign if benign else 1.0
    return math.inf if share >= 1 else -math.inf if share <= 0 else NormalDist().inv_cdf(share)
