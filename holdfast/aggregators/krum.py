"""Krum: the one update that lies closest to its nearest others (Blanchard et al., NeurIPS 2017, section 3)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.geometry import distances
from holdfast.aggregators.ordered import by_id, equal_weights, lowest
from holdfast.core.registry import register
from holdfast.core.types import State

PAPER = "Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017"


@register("aggregator", "krum", paper=PAPER)
class Krum(Aggregator):
    """The update with the smallest sum of squared distances to its n - f - 2 nearest others.

    Assumes that honest updates lie near each other: with heterogeneous clients the one that is taken speaks for few of them.
    Equal scores: the lowest id. The weight returned is 1 for the update that was taken."""

    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n > 2f + 2"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})

    def least(self, f: int) -> int:
        return 2 * f + 3

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        best = lowest(crowding(distances(x), len(x) - ctx.assumed - 2), 1, ctx.ids)
        return Reduced(x[best][0], equal_weights(best, x), state)


def crowding(far: Tensor, neighbours: int) -> Tensor:
    """Krum's score: how far the nearest others are, in sum."""
    return far.clone().fill_diagonal_(torch.inf).topk(neighbours, dim=1, largest=False).values.sum(dim=1)


def one_by_one(far: Tensor, f: int, m: int, ids: Tensor) -> Tensor:
    """m rows by repeating Krum on those that are left: each choice takes the winner out before the scores are made again."""
    order = by_id(ids, far)
    most = torch.finfo(far.dtype).max
    near, who = far.clamp(max=most)[order][:, order].fill_diagonal_(torch.inf).sort(dim=1)
    near, who = near[:, :-1], who[:, :-1].int()  # without oneself, who is last
    left, chosen = torch.ones_like(order, dtype=torch.bool), []
    for taken in range(m):
        scores = near[:, : max(1, len(far) - taken - f - 2)].sum(dim=1).clamp_(max=most)
        winner = scores.masked_fill_(~left, torch.inf).argmin()
        chosen.append(winner)
        left = left.index_fill(0, winner, False)
        if not near.shape[1]:
            break  # that was the last one
        place = (who == winner).int().argmax(dim=1, keepdim=True)  # in everyone's list; who comes after moves up
        stays = torch.arange(near.shape[1] - 1, device=far.device) < place
        near, who = torch.where(stays, near[:, :-1], near[:, 1:]), torch.where(stays, who[:, :-1], who[:, 1:])
    return order[torch.stack(chosen)]
