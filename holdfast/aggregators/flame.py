"""FLAME: the majority of clients that point the same way, shortened to the median length, with a little noise
(Nguyen et al., USENIX Security 2022, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate, vectors
from holdfast.aggregators.geometry import norms, weighted
from holdfast.aggregators.majority_cluster import PAPER, MajorityCluster
from holdfast.core.columns import Reads, current
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import State


@register("aggregator", "flame", paper=PAPER)
class Flame(MajorityCluster, Aggregator):
    """The plain mean of the clients in the largest cluster of directions, each shortened to the median length
    of all updates, plus Gaussian noise in every coordinate.

    HDBSCAN clusters the cosine distances of the clients' models (`of = "update"`: of their updates, as many
    later comparisons do); a cluster has more than half of the clients, and all others are left out. It takes
    the densest such part: of a cohort in which all are honest and equally far apart little more than half
    stays. The noise has the standard deviation `noise` (lambda, Algorithm 1) times the median length; the
    paper takes 0.001 for images and texts and 0.01 for network traffic. `noise = 0` leaves it out. Where
    there is no such cluster, the median is the fallback. The weights returned are equal ones on the clients
    that stay, shortened as their updates are."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": (
            "mean of the majority cluster of directions, shortened to the median length, with noise"
        ),
        "weights returned": "equal, on those that stay, shortened",
        "variants and options": (
            '`noise`: as a share of the median length; `of = "update"`: directions of updates, not of models'
        ),
        "paper": "Nguyen et al. 2022",
    }
    reads: ClassVar[Reads] = "gram"
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n > 2f"
    noise: float = setting(0.001, "standard deviation of the noise, in median lengths of the updates", ge=0)

    def least(self, f: int) -> int:
        return 2 * f + 1

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        received = vectors([ctx.received], x)[0]
        value, weights = self.merged(x, ctx.ids, received, ctx.key)
        return Reduced(value, weights, state) if bool(weights.any()) else self.fall_back(x, state, ctx)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        received = vectors([ctx.received for ctx in contexts], x)
        key = Key(torch.stack([ctx.key.bits for ctx in contexts]))
        value, weights = self.merged(x, ids_of(contexts), received, key)
        found = separate(value, weights, states)
        some = weights.any(dim=-1).tolist()
        return [
            result if good else self.fall_back(*of)
            for result, good, *of in zip(found, some, x, states, contexts, strict=True)
        ]

    def merged(self, x: Tensor, ids: Tensor, received: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        """The aggregate and the weights; all of these are 0 where there is no cluster."""
        admitted = self.admitted(self.apart(x, received, None), ids)
        length = norms(x)
        bound = length.quantile(0.5, dim=-1, keepdim=True)
        shorter = (bound / length).nan_to_num_(nan=1.0, posinf=1.0).clamp_(max=1)
        count = admitted.sum(dim=-1, keepdim=True).clamp(min=1)
        weights = (admitted * shorter / count).to(x.dtype)
        value = weighted(weights, x)
        if self.noise:
            value = value + (self.noise * bound * _normal(key, x)).to(x.dtype)
        return value, weights


def _normal(key: Key, x: Tensor) -> Tensor:
    """Standard normal numbers for the columns of x that are here, the same however many processes share
    them."""
    shared = current()
    drawn = key.to(x.device).normal(x.shape[-1] if shared is None else shared.total, dtype=torch.float64)
    return drawn if shared is None else shared.mine(drawn)
