"""Min-Sum: no farther from all clients together than the client that is farthest from all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor

from holdfast.attacks.base import Attack, Knowledge, View, Whom
from holdfast.attacks.distances import (
    Line,
    Lines,
    Perturbation,
    coarse,
    coarse_of_each,
    largest,
    largest_of_each,
    line,
    lines,
)
from holdfast.attacks.several import Views
from holdfast.core.columns import Reads
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink

_ALONE = "min-sum: fewer than two updates are known, so attackers send their own"


@register("attack", "min-sum", paper="Shejwalkar and Houmansadr: Manipulating the Byzantine, NDSS 2021")
class MinSum(Attack):
    """Sends mean + gamma * p, no farther from all clients together than some client is.

    gamma is the largest at which the sum of its squared distances to the clients is no larger than the
    largest sum of a client. Where fewer than two clients are known, they stay honest."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker"
        " does": "sends mean + gamma p, within the largest sum of squared distances of a client",
        "settings, with their defaults": '`perturbation = "std"`, `statistics = "all"`',
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "gram"
    least: ClassVar[Knowledge] = "colluders"
    knows: Knowledge = setting("everyone", "updates that it uses: colluders, everyone")
    perturbation: Perturbation = setting(
        "std", "p: minus the spread, minus the mean's direction, or minus its signs"
    )
    statistics: Whom = setting(
        "all", "use all clients, attackers' honest updates included, or benign ones only"
    )
    variant: Literal["paper", "authors"] = setting(
        "paper", "authors: FedCAP's code, distances not squared, gamma in steps of 0.05"
    )

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        out = {}
        for name in self.targets(schema):
            known = view.known(name, self.statistics)
            if len(known) < 2:
                view.note(_ALONE)
                continue
            way = line(known, self.perturbation)
            out[name] = way.mean + (self._gamma(way) if way.length > 0 else 0.0) * way.direction
        return out

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        out = {}
        for name in self.targets(schema):
            known = views.known(name, self.statistics)
            if known.shape[1] < 2:
                views.note(_ALONE)
                continue
            ways = lines(known, self.perturbation)
            out[name] = ways.points(self._gammas(ways))[:, None]
        return out

    def _gamma(self, way: Line) -> float:
        if self.variant == "paper":
            bound = float(way.pairs.sum(1).max())
            return largest(lambda gamma: float(way.squared(gamma).sum()) <= bound)
        bound = float(way.pairs.sqrt().sum(1).max())
        return coarse(lambda gamma: float(way.squared(gamma).sqrt().sum()) <= bound)

    def _gammas(self, ways: Lines) -> Tensor:
        if self.variant == "paper":
            bounds = ways.pairs.sum(2).amax(1)
            return largest_of_each(lambda gammas: ways.squared(gammas).sum(1) <= bounds, len(bounds))
        bounds = ways.pairs.sqrt().sum(2).amax(1)
        return coarse_of_each(lambda gammas: ways.squared(gammas).sqrt().sum(1) <= bounds, len(bounds))
