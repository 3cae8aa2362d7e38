"""Bucketing (Karimireddy, He and Jaggi, ICLR 2022): the rule sees means of a few random clients, which differ less than clients do.

A bad client spoils one bucket, so the rule inside is given the same number of attackers for fewer vectors; where these are too few for
it, its own fallback answers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.core.errors import ConfigError
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.wrappers.base import Around

PAPER = "Karimireddy, He and Jaggi, Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022"


@register("wrapper", "bucketing", paper=PAPER)
class Bucketing(Around):
    """The rule on the means of random buckets of s clients; new buckets in every round."""

    s: int = setting(2, "clients in a bucket; the last one may have fewer", ge=1)

    def check(self, inner: Aggregator) -> None:
        if inner.remembers() == "clients":
            raise ConfigError(
                f"aggregator.wrap: '{inner.name}' remembers every client, but a bucket is another mixture in every round; "
                f"leave 'bucketing' out or switch that memory off"
            )

    def uses_priors(self, inner: Aggregator) -> bool:
        return True  # a bucket is a mean by sample counts, whatever the rule does with it

    def reduce(self, inner: Aggregator, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        n, key = len(x), ctx.key.fold("bucketing")
        order = key.fold(ctx.ids).bits.argsort()  # by client, so that the order of rows does not matter
        bucket = torch.empty(n, dtype=torch.int64)
        bucket[order] = torch.arange(n) // self.s
        count = -(-n // self.s)
        share, total = shares(w, bucket, count)
        mixed = torch.zeros(count, x.shape[1], dtype=x.dtype, device=x.device)
        for turn in range(min(self.s, n)):  # the first member of every bucket, the second, ...: no copy of all updates
            rows = order[turn :: self.s]
            mixed[: len(rows)] += share[rows, None].to(x.dtype) * x[rows]
        found = inner(mixed, total, state, replace(ctx, ids=torch.arange(count), key=key))
        return found._replace(weights=found.weights[bucket] * share.to(found.weights.dtype))


def shares(w: Tensor, bucket: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each client's part in its bucket, and each bucket's prior weight; clients without any weight share their bucket equally."""
    total = torch.zeros(count, dtype=w.dtype).index_add(0, bucket, w)
    people = torch.bincount(bucket, minlength=count).to(w.dtype)
    alone = total[bucket] > 0
    return torch.where(alone, w / total[bucket].where(alone, 1.0), 1.0 / people[bucket]), total
