"""Clustered federated learning's bi-partition as a defence (Sattler et al., ICASSP 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.bipartition import at_odds, bipartition
from holdfast.aggregators.ordered import by_id
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = "Sattler et al., On the Byzantine Robustness of Clustered Federated Learning, ICASSP 2020"


@register("aggregator", "clustered", paper=PAPER)
class Clustered(Aggregator):
    """The cohort is cut in two by the directions of its updates, and the weighted mean of the larger part is
    taken.

    The cut makes the largest cosine across it as small as it can be, which is what single linkage does;
    `variant = "authors"` is complete linkage, as in FedCAP's code. Of two equal parts the one with the lowest
    id stays. Assumes that attackers point the same way as each other and another way than the rest; lengths
    are not looked at. It cuts in every round, also when all are honest, unless `mean_below` and `max_above`
    ask for the original's test first. The weights returned are those of the part that stays."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "cuts the cohort in two by direction, weighted mean of the larger part",
        "weights returned": "the incoming ones of that part",
        "variants and options": (
            '`variant = "authors"`: complete linkage (FedCAP\'s code), not single; `mean_below`, '
            "`max_above`: the original's test before a cut"
        ),
        "paper": "Sattler et al. 2020",
    }
    condition: ClassVar[str] = "n > 2f"
    keeps: ClassVar[frozenset[str]] = frozenset({"scale"})
    variant: Literal["paper", "authors"] = setting(
        "paper", "paper: single linkage, the best cut; authors: complete linkage (FedCAP)"
    )
    mean_below: float | None = setting(None, "cut only when the norm of the mean update is below this", gt=0)
    max_above: float | None = setting(None, "cut only when the largest norm of an update is above this", gt=0)

    def least(self, f: int) -> int:
        return 2 * f + 1

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        weights = w
        if len(x) > 2 and at_odds(x, w, self.mean_below, self.max_above):
            part = bipartition(x, ctx.ids, complete=self.variant == "authors")
            larger = 2 * part.sum() - len(x)
            stays = part == ((larger > 0) | (larger == 0) & part[by_id(ctx.ids, x)[0]])
            weights = torch.where(stays, w, 0)
            weights = weights / weights.sum() if bool(weights.sum() > 0) else stays.to(w.dtype) / stays.sum()
        return Reduced(weights @ x, weights, state)
