"""Bucketing (Karimireddy, He and Jaggi, ICLR 2022): the rule sees means of a few random clients, which differ
less than clients do.

A bad client spoils one bucket, so the rule inside is given the same number of attackers for fewer vectors;
where these are too few for it, its own fallback answers. FedCAP's code draws with the run's seed in every
round, so that the same cohort always has the same buckets, and gives the rule the attackers' share among
clients as that among buckets; `variant = "authors"` does so too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of
from holdfast.aggregators.geometry import mix
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.together import stacked
from holdfast.core.types import State
from holdfast.wrappers.base import Around, reduce_each

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
    reads: ClassVar[Reads] = "columns"
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

        if inner.trusts() is not None:
            raise ConfigError(
                f"aggregator.wrap: '{inner.name}' trusts one client, but it sees buckets of several; leave"
                " 'bucketing' out, or trusted"
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
        if x.device.type != "cpu":  # in a few large kernels
            return self.reduce_together(inner, x[None], w[None], [state], [ctx])[0]
        n, key = len(x), (ctx.key if self.variant == "paper" else Key(0)).fold("bucketing")
        order = key.fold(ctx.ids).bits.argsort()  # by client, so that the order of rows does not matter
        bucket = torch.empty_like(order)
        bucket[order] = torch.arange(n) // self.s
        count = -(-n // self.s)
        share, total = shares(w, bucket, count)
        mixed = x.new_zeros(count, x.shape[1])
        for turn in range(
            min(self.s, n)
        ):  # the first member of every bucket, the second, ...: no copy of all updates
            rows = order[turn :: self.s]
            mixed[: len(rows)] += share[rows, None].to(x.dtype) * x[rows]
        found = inner(mixed, total, state, self.inside(ctx, n))
        return found._replace(weights=found.weights[bucket] * share.to(found.weights.dtype))

    def inside(self, ctx: AggregationContext, n: int) -> AggregationContext:
        """What the rule on the buckets of n clients may know."""
        return replace(
            ctx.of_mixtures(),
            ids=torch.arange(-(-n // self.s)),
            key=ctx.key.fold("bucketing"),
            assumed=self.spoilt(n, ctx.assumed),
        )

    def reduce_together(
        self,
        inner: Aggregator,
        x: Tensor,
        w: Tensor,
        states: Sequence[State],
        contexts: Sequence[AggregationContext],
    ) -> list[Reduced]:
        n, count = x.shape[1], -(-x.shape[1] // self.s)
        own = Key(torch.stack([ctx.key.bits for ctx in contexts])[:, None])
        key = (own if self.variant == "paper" else Key(0)).fold("bucketing")
        order = to_device(key.fold(ids_of(contexts)).bits.argsort(dim=-1), x.device)
        bucket = torch.empty_like(order).scatter_(
            -1, order, (torch.arange(n, device=x.device) // self.s).expand(order.shape)
        )
        share, total = shares_together(to_device(w, x.device), order, bucket, self.s)
        mixing = x.new_zeros(len(x), count, n).scatter_(1, bucket[:, None], share[:, None].to(x.dtype))
        inside = [self.inside(ctx, n) for ctx in contexts]
        found = reduce_each(inner, mix(mixing, x), total, states, inside)
        weights = stacked([each.weights for each in found])
        weights = weights.gather(-1, bucket) * share.to(weights.dtype)
        return [each._replace(weights=its) for each, its in zip(found, weights, strict=True)]


def shares(w: Tensor, bucket: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each client's part in its bucket, and each bucket's prior weight; clients without any weight share
    their bucket equally."""
    total = w.new_zeros(count).index_add(0, bucket, w)
    members = torch.bincount(bucket, minlength=count).to(w.dtype)
    counted = total[bucket] > 0
    return torch.where(counted, w / total[bucket].where(counted, 1.0), 1.0 / members[bucket]), total


def shares_together(w: Tensor, order: Tensor, bucket: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """The same for several experiments [c, n], whose clients fill buckets of s in this order."""
    n = w.shape[1]
    ordered = torch.nn.functional.pad(w.gather(-1, order), (0, -n % s))
    total = ordered.view(len(w), -1, s).sum(dim=-1)
    members = torch.full_like(total, s)
    members[:, -1] = n - s * (total.shape[1] - 1)
    mine = total.gather(-1, bucket)
    equal = 1.0 / members.gather(-1, bucket)
    return torch.where(mine > 0, w / mine.where(mine > 0, 1.0), equal), total
