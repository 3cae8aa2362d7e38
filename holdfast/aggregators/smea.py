"""SMEA, smallest maximum eigenvalue averaging: the mean of the n - f clients that spread least in any
direction (Allouah et al., ICML 2023)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.aggregators.geometry import BLOCK, weighted
from holdfast.aggregators.ordered import arranged, by_id, equal_weights
from holdfast.aggregators.spectrum import centred, farthest_along, from_the_middle
from holdfast.core.columns import Reads
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = "Allouah et al., On the Privacy-Robustness-Utility Trilemma in Distributed Learning, ICML 2023"
_ROUNDING = 1e-9


@register("aggregator", "smea", paper=PAPER)
class SMEA(Aggregator):
    """The mean of the n - f updates whose covariance has the smallest leading eigenvalue, of all choices of
    n - f.

    There are C(n, f) choices, each with the eigenvalues of an [n - f, n - f] matrix of products. Where there
    are more than `limit` (n = 100 with f = 10 has 1.7e13), f clients are left out one after the other
    instead, each time the one farthest out along the leading eigenvector of those that are left; such a round
    counts as a fallback. Of equally good choices the one with the lowest ids is taken. The weights returned
    are equal ones on the updates that were averaged."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "mean of the n - f updates whose covariance has the smallest leading eigenvalue",
        "weights returned": "equal, on those averaged",
        "variants and options": (
            "`limit`: with more choices than this, f clients are left out one by one, which counts as a "
            "fallback"
        ),
        "paper": "Allouah et al. 2023",
    }
    reads: ClassVar[Reads] = "gram"
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n > 2f"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})
    limit: int = setting(2_000, "most choices of n - f clients that are all tried", ge=1)

    def least(self, f: int) -> int:
        return 2 * f + 1

    def idle(self) -> bool:
        return self.f is None

    def exact(self, n: int, f: int) -> bool:
        """Whether all choices are tried."""
        return math.comb(n, f) <= self.limit

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        n, f = len(x), ctx.assumed
        if n < self.least(f):
            return self.fall_back(x, state, ctx)
        weights = self.shares(x, ctx.ids, f)
        return Reduced(weighted(weights, x), weights, state, fallback=not self.exact(n, f))

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        n, f = x.shape[1], contexts[0].assumed
        if n < self.least(f):
            return self.fall_back_together(x, states, contexts)
        weights = self.shares(x, ids_of(contexts), f)
        return separate(weighted(weights, x), weights, states, [not self.exact(n, f)] * len(states))

    def shares(self, x: Tensor, ids: Tensor, f: int) -> Tensor:
        order = by_id(ids, x)
        seen = arranged(from_the_middle(x, ids), order)
        places = least_spread(seen, f) if self.exact(x.shape[-2], f) else one_after_another(seen, f)
        return equal_weights(order.gather(-1, places), x)


def least_spread(seen: Tensor, f: int) -> Tensor:
    """The places [..., n - f] of the choice with the smallest leading eigenvalue; of equal ones the first."""
    sizes, choices = [], []
    for several in _choices(seen.shape[-1], f, max(1, 4 * BLOCK // seen.numel())):
        places = several.to(seen.device)
        part = seen[..., places[:, :, None], places[:, None, :]]
        even = torch.full_like(part[..., 0], 1 / part.shape[-1])
        sizes.append(torch.linalg.eigvalsh(centred(part, even))[..., -1])
        choices.append(places)
    found, every = torch.cat(sizes, dim=-1), torch.cat(choices)
    good = found <= found.amin(dim=-1, keepdim=True).clamp(min=0) * (1 + _ROUNDING)
    return every[good.to(torch.uint8).argmax(dim=-1)]


def _choices(n: int, f: int, count: int) -> Iterator[Tensor]:
    """All choices of n - f places, the lowest first, so many at a time."""
    every = combinations(range(n), n - f)
    while several := list(islice(every, count)):
        yield torch.tensor(several)


def one_after_another(seen: Tensor, f: int) -> Tensor:
    """The places [..., n - f] that are left when the one farthest out is left out f times."""
    there = torch.ones_like(seen[..., 0])
    for _ in range(f):
        about = centred(seen, there / there.sum(dim=-1, keepdim=True))
        about = about * there[..., :, None] * there[..., None, :]
        far = torch.where(there > 0, farthest_along(about), -1)
        most = far.amax(dim=-1, keepdim=True) * (1 - _ROUNDING)
        out = (far >= most).to(torch.uint8).argmax(dim=-1, keepdim=True)
        there = there.scatter(-1, out, 0.0)
    return there.argsort(dim=-1, descending=True, stable=True)[..., : seen.shape[-1] - f]
