"""Clustered federated learning's bi-partition as a defence (Sattler et al., ICASSP 2020)."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.geometry import cosines, norms
from holdfast.aggregators.ordered import by_id
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = "Sattler et al., On the Byzantine Robustness of Clustered Federated Learning, ICASSP 2020"


@register("aggregator", "clustered", paper=PAPER)
class Clustered(Aggregator):
    """The cohort is cut in two by the directions of its updates, and the weighted mean of the larger part is taken.

    The cut makes the largest cosine across it as small as it can be, which is what single linkage does; `variant = "authors"` is
    complete linkage, as in FedCAP's code. Of two equal parts the one with the lowest id stays. Assumes that attackers point the
    same way as each other and another way than the rest; lengths are not looked at. It cuts in every round, also when all are honest,
    unless `mean_below` and `max_above` ask for the original's test first. The weights returned are those of the part that stays."""

    condition: ClassVar[str] = "n > 2f"
    keeps: ClassVar[frozenset[str]] = frozenset({"scale"})
    variant: Literal["card", "authors"] = setting("card", "card: single linkage, the best cut; authors: complete linkage (FedCAP)")
    mean_below: float | None = setting(None, "cut only when the mean update is shorter than this", gt=0)
    max_above: float | None = setting(None, "cut only when the longest update is longer than this", gt=0)

    def least(self, f: int) -> int:
        return 2 * f + 1

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        weights = w
        if len(x) > 2 and self.wanted(x, w):
            order = by_id(ctx.ids, x)
            apart = (1 - cosines(x))[order][:, order].cpu().numpy()
            first = torch.from_numpy(two_parts(apart, complete=self.variant == "authors")).to(x.device)
            stays = torch.empty_like(first).index_copy_(0, order, first if int(first.sum()) * 2 >= len(x) else ~first)
            weights = torch.where(stays, w, 0)
            weights = weights / weights.sum() if bool(weights.sum() > 0) else stays.to(w.dtype) / stays.sum()
        return Reduced(weights @ x, weights, state)

    def wanted(self, x: Tensor, w: Tensor) -> bool:
        if self.mean_below is not None and bool(norms((w @ x)[None]) >= self.mean_below):
            return False
        return self.max_above is None or bool(norms(x).max() > self.max_above)


def two_parts(apart: np.ndarray, complete: bool) -> np.ndarray:
    """bool[n], true for those who end up with the first: the two nearest groups are joined until two are left.

    n - 2 joins that follow from each other, so this runs on the host; the nearest partner of each group is remembered, and a join
    looks again only for groups whose partner changed."""
    n, far = len(apart), apart.copy()
    np.fill_diagonal(far, np.inf)
    group, partner = np.arange(n), far.argmin(axis=1)
    nearest = far[group, partner]
    for _ in range(n - 2):
        a = int(nearest.argmin())
        a, b = sorted((a, int(partner[a])))
        joined = (np.maximum if complete else np.minimum)(far[a], far[b])
        joined[[a, b]] = np.inf
        far[a] = far[:, a] = joined
        far[b] = far[:, b] = np.inf
        group[group == b] = a
        stale = np.flatnonzero((partner == a) | (partner == b))
        stale = np.append(stale[nearest[stale] < np.inf], a)
        partner[stale] = far[stale].argmin(axis=1)
        nearest[stale] = far[stale, partner[stale]]
        nearest[b] = np.inf
        if not complete:  # the joined group may have come nearer to others
            closer = joined < nearest
            partner[closer], nearest[closer] = a, joined[closer]
    return group == group[0]
