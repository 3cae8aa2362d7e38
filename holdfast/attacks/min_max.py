"""Min-Max: no farther from any client than two clients are from each other."""

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

_ALONE = "min-max: fewer than two updates are known, so attackers send their own"


@register("attack", "min-max", paper="Shejwalkar and Houmansadr: Manipulating the Byzantine, NDSS 2021")
class MinMax(Attack):
    """Sends mean + gamma * p, no farther from any client than clients are from each other.

    gamma is the largest at which its largest distance to a client is no larger than the largest between two
    clients. Where fewer than two clients are known, they stay honest."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends mean + gamma p, within the largest distance of two clients",
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
        "paper", "authors: FedCAP's search for gamma, in steps of 0.05"
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
        bound, search = float(way.pairs.max()), largest if self.variant == "paper" else coarse
        return search(lambda gamma: float(way.squared(gamma).max()) <= bound)

    def _gammas(self, ways: Lines) -> Tensor:
        bounds = ways.pairs.amax((1, 2))
        search = largest_of_each if self.variant == "paper" else coarse_of_each
        return search(lambda gammas: ways.squared(gammas).amax(1) <= bounds, len(bounds))
