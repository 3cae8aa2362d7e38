"""The mean around the median (Xie, Koyejo and Gupta, Generalized Byzantine-tolerant SGD, 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.aggregators.geometry import blocks, total
from holdfast.aggregators.ordered import around_the_median, by_id, columns_in_order, spread
from holdfast.core.columns import Reads
from holdfast.core.registry import register
from holdfast.core.types import State

PAPER = "Xie, Koyejo and Gupta, Generalized Byzantine-tolerant SGD, 2018"


@register("aggregator", "meamed", paper=PAPER)
class Meamed(Aggregator):
    """The mean of the n - f values of every coordinate that lie nearest to its median.

    Tolerates f wrong values in each coordinate, also where they come from other clients in each. Of two
    values equally far from the median the lower one counts. The weight returned is each client's share of the
    values that were averaged."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "mean of the n - f values of each coordinate nearest to its median",
        "weights returned": "share of the values averaged",
        "paper": "Xie et al. 2018",
    }
    reads: ClassVar[Reads] = "columns"
    uses_priors: ClassVar[bool] = False
    coordinatewise: ClassVar[bool] = True
    condition: ClassVar[str] = "n > 2f"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})

    def least(self, f: int) -> int:
        return 2 * f + 1

    def idle(self) -> bool:
        return self.f is None

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        return Reduced(*nearest_to_the_median(x, ctx.ids, len(x) - ctx.assumed), state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        n, f = x.shape[1], contexts[0].assumed
        if n < self.least(f):
            return self.fall_back_together(x, states, contexts)
        return separate(*nearest_to_the_median(x, ids_of(contexts), n - f), states)


def nearest_to_the_median(x: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The means of so many values, and each row's share of what was averaged."""
    order, value = by_id(ids, x), torch.empty_like(x[..., 0, :])
    kept = torch.zeros_like(order)
    for columns in blocks(x):
        value[..., columns], found = around_the_median(*columns_in_order(x, order, columns), count)
        kept += found
    return value, spread(total(kept), order, x.dtype)
