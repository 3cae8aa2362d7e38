"""The coordinate-wise median (Yin et al., ICML 2018, Definition 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from torch import Tensor

from holdfast.aggregators import ordered
from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.core.columns import Reads
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = "Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018"


@register("aggregator", "median", paper=PAPER)
class Median(Aggregator):
    """The middle value of every coordinate; with an even number of clients the mean of the two middle ones.

    Assumes that honest clients agree about where the middle is: what only a minority of them learns is lost.
    The weight returned is the share of coordinates at which a client was the middle one."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "middle value of each coordinate",
        "weights returned": "share of coordinates at which the client is the middle",
        "variants and options": (
            '`variant = "lower"`: the lower of two middle values (FedCPA\'s code), not their mean'
        ),
        "paper": "Yin et al. 2018",
    }
    reads: ClassVar[Reads] = "columns"
    uses_priors: ClassVar[bool] = False
    coordinatewise: ClassVar[bool] = True
    condition: ClassVar[str] = "n > 2f"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})
    variant: Literal["paper", "lower"] = setting(
        "paper", "of two middle values: their mean, or the lower one (FedCPA's code)"
    )

    def least(self, f: int) -> int:
        return 2 * f + 1

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        return Reduced(*ordered.median(x, ctx.ids, lower=self.variant == "lower"), state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        found = ordered.median(x, ids_of(contexts), lower=self.variant == "lower")
        return separate(*found, states)
