"""Which clients make the model worse: what LFR and ERR share (Fang, Cao, Jia, Gong: Local Model Poisoning
Attacks to Byzantine-Robust Federated Learning, USENIX Security 2020, section 5).

For each client i the server tests, on its own data, the model of the rule on all updates (A) and the model of
the rule on all updates but that of i (B). The impact of i is E_A - E_B for the error rate, L_A - L_B for the
loss: the more it is, the better is the model without i. The c clients of the largest impact are left out, and
the rule is applied to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Assessment, Reduced
from holdfast.aggregators.ordered import lowest
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.errors import ConfigError
from holdfast.core.types import State
from holdfast.wrappers.base import Around, need_f
from holdfast.wrappers.gas import bearable

PAPER = (
    "Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated Learning, USENIX Security 2020"
)


class Rejection(Around):
    """Base class of both: a subclass says which impacts count."""

    reads: ClassVar[Reads] = "sum"

    def check(self, inner: Aggregator) -> None:
        need_f(self, inner)
        if "assess" in inner.needs:
            raise ConfigError(
                f"aggregator.wrap: '{inner.name}' tests models itself, which '{self.name}' around it would"
                " ask for many times; leave one of them out (lfr has union = true)"
            )

    def needs(self, inner: Aggregator) -> frozenset[str]:
        return inner.needs | {"root", "assess"}

    def condition(self, inner: Aggregator) -> str:
        return f"{inner.condition} and n > f"

    def least(self, inner: Aggregator, f: int) -> int:
        return max(inner.least(f), inner.least(0) + f)

    def impacts(self, found: Assessment) -> Sequence[Tensor]:
        """[n] each: what the clients of the largest are left out by. The first model is that of all."""
        raise TypeError(f"{type(self).__name__} does not define what it measures")

    def reduce(
        self, inner: Aggregator, x: Tensor, w: Tensor, state: State, ctx: AggregationContext
    ) -> Reduced:
        n, keep = len(x), len(x) - ctx.assumed
        if keep < 1 or ctx.assess is None:
            return inner.fall_back(x, state, ctx)
        assessment = ctx.assess(lambda: candidates(inner, x, w, state, ctx))
        if not len(assessment.loss):  # the server's own test was lost
            return inner.fall_back(x, state, ctx)
        kept = torch.ones(n, dtype=torch.bool)
        for impact in self.impacts(assessment):
            kept &= torch.zeros(n, dtype=torch.bool).index_fill_(0, lowest(impact, keep, ctx.ids), True)
        if not bool(kept.any()):  # the union of both measures may be everybody
            return inner.fall_back(x, state, ctx)
        some = x if bool(kept.all()) else x[to_device(kept, x.device)]
        return of_some(inner, some, w, state, ctx, kept)


def candidates(
    inner: Aggregator, x: Tensor, w: Tensor, state: State, ctx: AggregationContext
) -> list[Reduced]:
    """The rule on all updates, and on all but each in turn. The others lie in one copy, of which a row
    changes from each to the next."""
    n, every = len(x), torch.ones(len(x), dtype=torch.bool)
    found = [of_some(inner, x, w, state, ctx, every)]
    others = x[min(1, n - 1) :].clone()
    for one in range(n):
        if one:
            others[one - 1] = x[one - 1]
        mask = every.index_fill(0, torch.tensor([one] if n > 1 else [], dtype=torch.int64), False)
        without = of_some(inner, others, w, state, ctx, mask)
        found.append(without._replace(value=without.value.clone()))  # it may be a row of the copy
    return found


def of_some(
    inner: Aggregator, some: Tensor, w: Tensor, state: State, ctx: AggregationContext, kept: Tensor
) -> Reduced:
    """The rule on the updates of some clients, with at most as many attackers assumed as it can bear; the
    others have no weight."""
    mine = w[to_device(kept, w.device)]
    shares = mine / mine.sum() if bool(mine.sum() > 0) else torch.full_like(mine, 1 / len(mine))
    told = bearable(inner, len(some), ctx.assumed)
    probe = ctx.probe and ctx.probe.only(kept.nonzero().flatten())
    found = inner(some, shares, state, replace(ctx, ids=ctx.ids[kept], assumed=told, probe=probe))
    weights = found.weights.new_zeros(len(kept))
    weights[to_device(kept, weights.device)] = found.weights
    return found._replace(weights=weights)
