"""Nearest-neighbour mixing (Allouah et al., AISTATS 2023): every update is replaced by the mean of those
nearest to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import field_validator
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, how_many, whole_or_share
from holdfast.aggregators.geometry import distances
from holdfast.aggregators.ordered import by_id
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.wrappers.base import Around, need_f

PAPER = (
    "Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity, AISTATS 2023"
)


@register("wrapper", "nnm", paper=PAPER)
class NearestNeighbourMixing(Around):
    """The rule on mixtures: each update becomes the plain mean of the n - f updates nearest to it, itself
    among them.

    Where f is as large as the cohort there is nothing to mix: the rule gets the updates themselves, and the
    round counts as a fallback."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what the rule sees": "for every client the mean of the n - f updates nearest to its own",
        "what comes out": "the rule's aggregate; weights are the share of each client in it",
        "from": "Allouah et al., AISTATS 2023",
    }
    f: float | None = setting(
        None,
        "updates left out of each mixture: a number (>= 1) or a share (< 1); none: the rule's own f",
        ge=0,
    )

    @field_validator("f")
    @classmethod
    def _sensible(cls, f: float | None) -> float | None:
        return whole_or_share(f)

    def check(self, inner: Aggregator) -> None:
        if self.f is None:
            need_f(self, inner)

    def condition(self, inner: Aggregator) -> str:
        return f"{inner.condition} and n > {'f' if self.f is None else f'{self.f:g}'}"

    def least(self, inner: Aggregator, f: int) -> int:
        left_out = f if self.f is None else int(self.f)  # a share always leaves something
        return max(inner.least(f), left_out + 1)

    def reduce(
        self, inner: Aggregator, x: Tensor, w: Tensor, state: State, ctx: AggregationContext
    ) -> Reduced:
        n = len(x)
        near = n - (ctx.assumed if self.f is None else how_many(self.f, n))
        if near < 1:
            return inner(x, w, state, ctx)._replace(fallback=True)
        apart = distances(x)
        apart.fill_diagonal_(-1.0)  # a client is nearest to itself, also where another one is equal
        order = by_id(ctx.ids, x)
        nearest = order[
            apart[:, order].argsort(dim=1, stable=True)[:, :near]
        ]  # among equally near ones, the lowest ids
        mixing = x.new_zeros(n, n).scatter(1, nearest, 1.0 / near)
        found = inner(mixing @ x, w, state, ctx)
        return found._replace(weights=found.weights @ mixing.to(found.weights.dtype))
