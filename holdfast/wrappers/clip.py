"""Clipping before a rule: no client's update has a norm above a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.geometry import norms
from holdfast.core.columns import Reads
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.wrappers.base import Around, reduce_each


@register("wrapper", "clip")
class Clip(Around):
    """The rule on updates shortened to a norm; shorter ones pass as they are. The server's own root update is
    not touched."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what the rule sees": "updates shortened to `norm`, in median norms or absolute",
        "what comes out": "the rule's aggregate",
    }
    reads: ClassVar[Reads] = "gram"
    norm: float = setting(1.0, "largest length of an update", gt=0)
    unit: Literal["median", "absolute"] = setting(
        "median", "unit of the norm: the cohort's median norm, or absolute"
    )

    def reduce(
        self, inner: Aggregator, x: Tensor, w: Tensor, state: State, ctx: AggregationContext
    ) -> Reduced:
        return inner(self.shortened(x), w, state, ctx)

    def reduce_together(
        self,
        inner: Aggregator,
        x: Tensor,
        w: Tensor,
        states: Sequence[State],
        contexts: Sequence[AggregationContext],
    ) -> list[Reduced]:
        return reduce_each(inner, self.shortened(x), w, states, contexts)

    def shortened(self, x: Tensor) -> Tensor:
        length = norms(x)
        bound = self.norm * length.quantile(0.5, dim=-1, keepdim=True) if self.unit == "median" else self.norm
        return to_length(x, length, bound)


def to_length(x: Tensor, length: Tensor, bound: Tensor | float) -> Tensor:
    """A copy of the updates with at most this length."""
    shrink = (bound / length).nan_to_num(1.0).clamp(max=1.0)  # 0 / 0: an update of no length stays
    return shrink[..., None].to(x.dtype) * x
