"""FoundationFL (Fang et al., NDSS 2025): a rule that is well known, on the updates and copies of the one that
is farthest from all extremes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import field_validator
from torch import Tensor

from holdfast.aggregators.base import (
    AggregationContext,
    Aggregator,
    Reduced,
    how_many,
    ids_of,
    whole_or_share,
)
from holdfast.aggregators.geometry import blocks, only, over_columns
from holdfast.aggregators.ordered import lowest
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.errors import ConfigError
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.wrappers.base import Around, reduce_each

PAPER = "Fang et al., Do We Really Need to Design New Byzantine-robust Aggregation Rules?, NDSS 2025"


@register("wrapper", "foundation", paper=PAPER)
class Foundation(Around):
    """The rule on the n updates and m copies of one of them: the update that is farthest from the extremes.

    With g_max and g_min the largest and smallest value of each coordinate, an update's score is min(|g_i -
    g_max|, |g_i - g_min|), and the one of the highest score is copied; of equal ones that of the lowest id.
    The paper's rules inside are `trimmed-mean` and `median`; any other that keeps no memory of clients will
    do. A copy weighs what its client weighs, and the rule assumes the same f among n + m vectors; the n
    clients alone have to meet its condition. Assumes that malicious updates are extreme: one with far values
    of both signs has the highest score of all, and then the copies are its. Costs a second copy of the
    updates, by half as large with `copies = 0.5`."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what the rule sees": "the updates, and `copies` of the one farthest from the extremes",
        "what comes out": "the rule's aggregate; the weights of copies are their client's",
        "from": "Fang et al., NDSS 2025",
    }
    reads: ClassVar[Reads] = "gram"
    copies: float = setting(0.5, "copies: a number (>= 1) or a share of the cohort (< 1)", gt=0)

    @field_validator("copies")
    @classmethod
    def _sensible(cls, copies: float) -> float | None:
        return whole_or_share(copies)

    def check(self, inner: Aggregator) -> None:
        if inner.remembers() == "clients":
            raise ConfigError(
                f"aggregator.wrap: '{inner.name}' remembers every client, but every round has copies of"
                " another one; leave 'foundation' out or switch that memory off"
            )

    def reduce(
        self, inner: Aggregator, x: Tensor, w: Tensor, state: State, ctx: AggregationContext
    ) -> Reduced:
        rows, ids = self.rows(x, ctx.ids)
        found = inner(x[rows], _shares(to_device(w, x.device)[rows]), state, _told(ctx, ids, rows))
        return found._replace(weights=_of_clients(found.weights, rows, len(x)))

    def reduce_together(
        self,
        inner: Aggregator,
        x: Tensor,
        w: Tensor,
        states: Sequence[State],
        contexts: Sequence[AggregationContext],
    ) -> list[Reduced]:
        rows, ids = self.rows(x, ids_of(contexts))
        inside = [_told(*of) for of in zip(contexts, ids, rows, strict=True)]
        every = torch.stack([own[its] for own, its in zip(x, rows, strict=True)])
        weights = _shares(to_device(w, x.device).gather(-1, rows))
        found = reduce_each(inner, every, weights, states, inside)
        return [
            each._replace(weights=_of_clients(each.weights, own, x.shape[1]))
            for each, own in zip(found, rows, strict=True)
        ]

    def rows(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[..., n + m]: the rows that the rule sees, those of the clients first, and ids for them. A copy
        comes after all clients, so that a client wins a tie with it."""
        n = x.shape[-2]
        m = how_many(self.copies, n)
        best = lowest(-scores(x), 1, ids)
        everyone = torch.arange(n, device=x.device).expand(*best.shape[:-1], n)
        numbers = ids.amax(dim=-1, keepdim=True) + 1 + torch.arange(m)
        rows = torch.cat([everyone, best.expand(*best.shape[:-1], m)], dim=-1)
        return rows, torch.cat([ids, numbers], dim=-1)


def scores(x: Tensor) -> Tensor:
    """[..., n] in float64: the distance of each row to the nearer one of the two extremes."""

    def of(columns: slice) -> Tensor:
        mine, found = only(x, columns), torch.zeros_like(zero)
        for block in blocks(mine, times=3):
            part = mine[..., block].double()
            for place, extreme in enumerate((part.amax(-2, keepdim=True), part.amin(-2, keepdim=True))):
                found[..., place] += (part - extreme).square_().sum(-1)
        return found

    zero = torch.zeros(*x.shape[:-1], 2, dtype=torch.float64, device=x.device)
    return over_columns(zero, of).amin(dim=-1).sqrt_()


def _told(ctx: AggregationContext, ids: Tensor, rows: Tensor) -> AggregationContext:
    """What the rule may know about the clients and the copies; a copy has its client's buffers."""
    return replace(ctx, ids=ids, probe=ctx.probe and ctx.probe.only(rows))


def _shares(w: Tensor) -> Tensor:
    """Weights that sum to 1; equal ones where no client has any."""
    total = w.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, w / total, 1 / w.shape[-1])


def _of_clients(weights: Tensor, rows: Tensor, n: int) -> Tensor:
    """[n]: the weight of each client with that of its copies."""
    return weights.new_zeros(n).index_add_(0, to_device(rows, weights.device), weights)
