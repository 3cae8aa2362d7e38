"""Krum: the one update that lies closest to its nearest others (Blanchard et al., NeurIPS 2017, section
3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.aggregators.geometry import diagonal, distances
from holdfast.aggregators.ordered import arranged, by_id, equal_weights, lowest
from holdfast.core.columns import Reads
from holdfast.core.registry import register
from holdfast.core.types import State

PAPER = (
    "Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017"
)


@register("aggregator", "krum", paper=PAPER)
class Krum(Aggregator):
    """The update with the smallest sum of squared distances to its n - f - 2 nearest others.

    Assumes that honest updates lie near each other: with heterogeneous clients the chosen update represents
    few of them. Equal scores: the lowest id. The weight returned is 1 for the update that was taken."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "the update with the smallest sum of squared distances to its n - f - 2 nearest",
        "weights returned": "1 for that client",
        "paper": "Blanchard et al. 2017",
    }
    reads: ClassVar[Reads] = "gram"
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n > 2f + 2"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})

    def least(self, f: int) -> int:
        return 2 * f + 3

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        return Reduced(*closest(x, ctx.ids, ctx.assumed), state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        return separate(*closest(x, ids_of(contexts), contexts[0].assumed), states)


def closest(x: Tensor, ids: Tensor, f: int) -> tuple[Tensor, Tensor]:
    """The row of the best score, and the weight 1 for it."""
    best = lowest(crowding(distances(x), x.shape[-2] - f - 2), 1, ids)
    return x.take_along_dim(best[..., None], dim=-2)[..., 0, :], equal_weights(best, x)


def crowding(far: Tensor, neighbours: int) -> Tensor:
    """Krum's score: how far the nearest others are, in sum."""
    far = far.clone()
    diagonal(far).fill_(torch.inf)
    return far.topk(neighbours, dim=-1, largest=False).values.sum(dim=-1)


def one_by_one(far: Tensor, f: int, m: int, ids: Tensor) -> Tensor:
    """m rows by repeating Krum on those that are left: each choice takes the winner out before the scores are
    made again.

    With one row fewer, one neighbour fewer counts. So everyone's neighbours lose one at each choice and gain
    none: the winner where it is among them, else the farthest. They are linked by distance, from an empty
    place after the last and around to it; and their distances are summed in runs of 32, of which a choice
    changes one, never by taking off what a sum had: 1e30 + 1 - 1e30 is 0."""
    n, order, most = far.shape[-1], by_id(ids, far), torch.finfo(far.dtype).max
    far = arranged(far.clamp(max=most), order)
    diagonal(far).fill_(torch.inf)
    near, who = far.sort(dim=-1)
    numbers, count = torch.arange(n, device=far.device), n - f - 2
    place = (
        torch.empty_like(who).scatter_(-1, who, numbers.expand(who.shape)).mT.contiguous()
    )  # [client, whose list]
    near = torch.nn.functional.pad(near[..., :count], (0, 32 - count % 32))
    runs = near.view(*near.shape[:-1], -1, 32)
    sums = runs.sum(dim=-1)
    nearer, farther = (
        numbers[: count + 1].roll(step).expand(*order.shape, count + 1).clone() for step in (1, -1)
    )
    farthest, taken, chosen = torch.full_like(order, count - 1), torch.zeros_like(order, dtype=torch.bool), []
    for left in range(count, count - m, -1):  # neighbours that count; never less than one
        scores = (sums.sum(dim=-1) if left > 0 else far.amin(dim=-1)).clamp_(max=most)
        winner = scores.masked_fill_(taken, torch.inf).argmin(dim=-1, keepdim=True)
        chosen.append(winner)
        taken.scatter_(-1, winner, True)
        far.scatter_(-1, winner[..., None, :].expand(*order.shape, 1), torch.inf)
        if left > 1:
            its = place.take_along_dim(winner[..., None], dim=-2)[..., 0, :]
            gone = torch.minimum(its, farthest)[..., None]
            before, after = nearer.gather(-1, gone), farther.gather(-1, gone)
            nearer.scatter_(-1, after, before)
            farther.scatter_(-1, before, after)
            near.scatter_(-1, gone, 0.0)
            run = gone // 32
            sums.scatter_(-1, run, runs.take_along_dim(run[..., None], dim=-2).sum(dim=-1))
            farthest = torch.where(gone[..., 0] == farthest, before[..., 0], farthest)
    return order.gather(-1, torch.cat(chosen, dim=-1))
