"""Nearest-neighbour mixing (Allouah et al., AISTATS 2023): every update is replaced by the mean of those
nearest to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

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
from holdfast.aggregators.geometry import combined, diagonal, distances, mix
from holdfast.aggregators.ordered import by_id
from holdfast.core.columns import Reads
from holdfast.core.registry import register, setting
from holdfast.core.together import stacked
from holdfast.core.types import State
from holdfast.wrappers.base import Around, need_f, reduce_each

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
    reads: ClassVar[Reads] = "gram"
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
        near = self.near(len(x), ctx.assumed)
        if near < 1:
            return inner(x, w, state, ctx)._replace(fallback=True)
        mixing = mixtures(x, ctx.ids, near)
        found = inner(mix(mixing, x), w, state, ctx.of_mixtures())
        return found._replace(weights=_of_each(found.weights, mixing))

    def reduce_together(
        self,
        inner: Aggregator,
        x: Tensor,
        w: Tensor,
        states: Sequence[State],
        contexts: Sequence[AggregationContext],
    ) -> list[Reduced]:
        near = self.near(x.shape[1], contexts[0].assumed)
        if near < 1:
            found = reduce_each(inner, x, w, states, contexts)
            return [each._replace(fallback=True) for each in found]
        mixing = mixtures(x, ids_of(contexts), near)
        inside = [ctx.of_mixtures() for ctx in contexts]
        found = reduce_each(inner, mix(mixing, x), w, states, inside)
        weights = _of_each(stacked([each.weights for each in found]), mixing)
        return [each._replace(weights=own) for each, own in zip(found, weights, strict=True)]

    def near(self, n: int, f: int) -> int:
        """How many updates are in a mixture."""
        return n - (f if self.f is None else how_many(self.f, n))


def mixtures(x: Tensor, ids: Tensor, near: int) -> Tensor:
    """[..., n, n]: for each client equal shares of those nearest to it."""
    apart, order = distances(x), by_id(ids, x)
    diagonal(apart).fill_(-1.0)  # a client is nearest to itself, also where another one is equal
    in_order = order[..., None, :].expand(apart.shape)
    nearest = in_order.gather(
        -1, apart.gather(-1, in_order).argsort(dim=-1, stable=True)[..., :near]
    )  # among equally near ones, the lowest ids
    return x.new_zeros(apart.shape).scatter(-1, nearest, 1.0 / near)


def _of_each(weights: Tensor, mixing: Tensor) -> Tensor:
    """The weights of mixtures as those of the clients in them."""
    return combined(weights, mixing.to(weights.dtype))
