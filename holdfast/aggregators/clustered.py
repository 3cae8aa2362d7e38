"""Clustered federated learning's bi-partition as a defence (Sattler et al., ICASSP 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.aggregators.bipartition import at_odds, bipartition, bipartitions, pull_apart
from holdfast.aggregators.geometry import weighted
from holdfast.aggregators.ordered import by_id
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
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
    reads: ClassVar[Reads] = "gram"
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
        weights = w = to_device(w, x.device)
        if len(x) > 2 and at_odds(x, w, self.mean_below, self.max_above):
            weights = larger(bipartition(x, ctx.ids, complete=self.variant == "authors"), w, ctx.ids)
        return Reduced(weighted(weights, x), weights, state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        weights = w = to_device(w, x.device)
        if x.shape[1] > 2:
            ids = ids_of(contexts)
            cut = larger(bipartitions(x, ids, complete=self.variant == "authors"), w, ids)
            apart = pull_apart(x, w, self.mean_below, self.max_above)
            weights = torch.where(apart[:, None], cut, w)
        return separate(weighted(weights, x), weights, states)


def larger(part: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    """The weights of the larger of two parts; of equal ones, of that with the lowest id."""
    first = part.gather(-1, by_id(ids, part)[..., :1])
    more = (2 * part.sum(dim=-1) - part.shape[-1])[..., None]
    stays = part == ((more > 0) | (more == 0) & first)
    weights = torch.where(stays, w, 0)
    total = weights.sum(dim=-1, keepdim=True)
    even = stays.to(w.dtype) / stays.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / total, even)
