"""Clustered federated learning's bi-partition as a defence (Sattler et al., ICASSP 2020)."""

from __future__ import annotations

from typing import ClassVar, Literal

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
            part = two_parts((1 - cosines(x))[order][:, order], complete=self.variant == "authors")
            larger = 2 * part.sum() - len(x)
            stays = torch.empty_like(part).index_copy_(0, order, part == ((larger > 0) | (larger == 0) & part[0]))
            weights = torch.where(stays, w, 0)
            weights = weights / weights.sum() if bool(weights.sum() > 0) else stays.to(w.dtype) / stays.sum()
        return Reduced(weights @ x, weights, state)

    def wanted(self, x: Tensor, w: Tensor) -> bool:
        if self.mean_below is not None and bool(norms((w @ x)[None]) >= self.mean_below):
            return False
        return self.max_above is None or bool(norms(x).max() > self.max_above)


def two_parts(apart: Tensor, complete: bool) -> Tensor:
    """bool[n], one of the two groups that are left when the two nearest groups are joined again and again.

    In rounds instead of n - 2 joins one after the other, and where the numbers are: a join changes nothing for groups that have
    another nearest one. Of equally near groups the one with the lowest id is joined."""
    far = apart.clone().fill_diagonal_(torch.inf)
    return _complete(far) if complete else _single(far)


def _single(far: Tensor) -> Tensor:
    """Everybody joins its nearest group. Of all groups on the way, the one whose nearest is farthest off is a side of the best cut:
    nothing joins it before the last step. Of equal ones the last, so that the lowest ids stay together."""
    group, widest = torch.arange(len(far), device=far.device), far.new_tensor([-1.0])
    part = group < 0
    while len(far) > 1:
        nearest, partner = far.min(dim=1)
        lonely = len(far) - 1 - nearest.flip(0).argmax(dim=0, keepdim=True)
        part = torch.where(nearest[lonely] > widest, group == lonely, part)
        widest = torch.maximum(widest, nearest[lonely])
        here = torch.arange(len(far), device=far.device)
        head = torch.where((partner[partner] == here) & (here < partner), here, partner)  # of a pair that chose each other, the first
        for _ in range(len(far).bit_length()):
            head = head[head]
        heads, place = head.unique(return_inverse=True)
        for _ in range(2):  # rows, then columns
            nobody = far.new_full((len(heads), far.shape[1]), torch.inf)
            far = nobody.scatter_reduce_(0, place[:, None].expand_as(far), far, "amin").T.contiguous()
        far.fill_diagonal_(torch.inf)
        group = place[group]
    return part


def _complete(far: Tensor) -> Tensor:
    """All pairs of groups that are each other's nearest are joined at once."""
    group = torch.arange(len(far), device=far.device)
    while len(far) > 2:
        here, partner = torch.arange(len(far), device=far.device), far.argmin(dim=1)
        first = here[(partner[partner] == here) & (here < partner)]
        second = partner[first]
        for _ in range(2):  # rows, then columns
            far[first] = torch.maximum(far[first], far[second])
            far = far.T
        head = here.index_copy(0, second, first)
        heads, place = head.unique(return_inverse=True)
        far, group = far[heads][:, heads], place[group]
    return group == group[0]
