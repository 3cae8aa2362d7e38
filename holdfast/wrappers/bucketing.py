"""Bucketing (Karimireddy, He and Jaggi, ICLR 2022): the rule sees means of a few random clients, which differ
less than clients do.

A bad client spoils one bucket, so the rule inside is given the same number of attackers for fewer vectors;
where these are too few for it, its own fallback answers. FedCAP's code draws with the run's seed in every
round, so that the same cohort always has the same buckets, and gives the rule the attackers' share among
clients as that among buckets; `variant = "authors"` does so too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.wrappers.base import Around

PAPER = (
    "Karimireddy, He and Jaggi, Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022"
)


@register("wrapper", "bucketing", paper=PAPER)
class Bucketing(Around):
    """The rule on the means of random buckets of s clients; new buckets in every round."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what the rule sees": "the means of random buckets of `s` clients, by sample counts",
        "what comes out": "the rule's aggregate; a bucket's weight is shared out among its clients",
        "from": "Karimireddy et al., ICLR 2022",
    }
    s: int = setting(2, "clients in a bucket; the last one may have fewer", ge=1)
    variant: Literal["paper", "authors"] = setting(
        "paper",
        "paper: f bad buckets of those drawn in each round; authors: f / s bad ones of those drawn once"
        " (FedCAP)",
    )

    def check(self, inner: Aggregator) -> None:
        if inner.remembers() == "clients":
            raise ConfigError(
                f"aggregator.wrap: '{inner.name}' remembers every client, but every round has other"
                f" buckets; leave 'bucketing' out or switch that memory off"
            )

    def uses_priors(self, inner: Aggregator) -> bool:
        return True  # a bucket is a mean by sample counts, whatever the rule does with it

    def condition(self, inner: Aggregator) -> str:
        return f"{inner.condition} for n buckets of {self.s} clients"

    def least(self, inner: Aggregator, f: int) -> int:
        if self.variant == "paper":
            return self.s * (inner.least(f) - 1) + 1
        n = (
            self.s * (inner.least(-(-f // self.s)) - 1) + 1
        )  # enough for either rounding; a few fewer may be enough, too
        while n > 1 and inner.least(self.spoilt(n - 1, f)) <= -(-(n - 1) // self.s):
            n -= 1
        return n

    def spoilt(self, n: int, f: int) -> int:
        """How many of the buckets of n clients the rule is to assume malicious."""
        return f if self.variant == "paper" else f * -(-n // self.s) // n

    def reduce(
        self, inner: Aggregator, x: Tensor, w: Tensor, state: State, ctx: AggregationContext
    ) -> Reduced:
        n, key = len(x), (ctx.key if self.variant == "paper" else Key(0)).fold("bucketing")
        order = (
            key.fold(ctx.ids).bits.argsort().to(x.device)
        )  # by client, so that the order of rows does not matter
        bucket = torch.empty_like(order)
        bucket[order] = torch.arange(n, device=x.device) // self.s
        count = -(-n // self.s)
        share, total = shares(w, bucket, count)
        mixed = x.new_zeros(count, x.shape[1])
        for turn in range(
            min(self.s, n)
        ):  # the first member of every bucket, the second, ...: no copy of all updates
            rows = order[turn :: self.s]
            mixed[: len(rows)] += share[rows, None].to(x.dtype) * x[rows]
        inside = replace(
            ctx, ids=torch.arange(count), key=ctx.key.fold("bucketing"), assumed=self.spoilt(n, ctx.assumed)
        )
        found = inner(mixed, total, state, inside)
        return found._replace(weights=found.weights[bucket] * share.to(found.weights.dtype))


def shares(w: Tensor, bucket: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each client's part in its bucket, and each bucket's prior weight; clients without any weight share
    their bucket equally."""
    total = w.new_zeros(count).index_add(0, bucket, w)
    members = torch.bincount(bucket, minlength=count).to(w.dtype)
    counted = total[bucket] > 0
    return torch.where(counted, w / total[bucket].where(counted, 1.0), 1.0 / members[bucket]), total
