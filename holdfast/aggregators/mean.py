"""The weighted mean: FedAvg's rule (McMahan et al., AISTATS 2017, Algorithm 1). No defence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, separate
from holdfast.aggregators.geometry import weighted
from holdfast.core.columns import Reads
from holdfast.core.registry import register
from holdfast.core.types import State

PAPER = (
    "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"
)


@register("aggregator", "mean", paper=PAPER)
class Mean(Aggregator):
    """The weighted mean of the updates; a single lying client moves it anywhere."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "weighted mean; no defence",
        "weights returned": "the incoming ones",
        "paper": "McMahan et al. 2017",
    }
    reads: ClassVar[Reads] = "sum"
    coordinatewise: ClassVar[bool] = True
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale"})

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        return Reduced(weighted(w, x), w, state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        return separate(weighted(w, x), w, states)
