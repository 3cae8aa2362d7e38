"""The coordinate-wise trimmed mean (Yin et al., ICML 2018, Definition 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    separate,
    whole_or_share,
)
from holdfast.aggregators.geometry import blocks, total
from holdfast.aggregators.median import PAPER
from holdfast.aggregators.ordered import by_id, columns_in_order, spread, tally
from holdfast.core.columns import Reads
from holdfast.core.registry import register, setting
from holdfast.core.types import State


@register("aggregator", "trimmed-mean", paper=PAPER)
class TrimmedMean(Aggregator):
    """The mean of every coordinate without its q largest and q smallest values; q = f unless `trim` is set.

    With q < f, attackers who all pull to one side are not all cut off: FedCAP's q is half of f (`trim = 0.15`
    beside `f = 0.3`), FedCPA's is `trim = 1` of 10. The weight returned is each client's share of the values
    that were averaged."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "mean of each coordinate without its q largest and q smallest values; q = f",
        "weights returned": "share of the values averaged",
        "variants and options": "`trim`: another q, a number or a share; FedCAP: half of f, FedCPA: 1 of 10",
        "paper": "Yin et al. 2018",
    }
    reads: ClassVar[Reads] = "columns"
    uses_priors: ClassVar[bool] = False
    coordinatewise: ClassVar[bool] = True
    condition: ClassVar[str] = "n > 2f and n > 2 trim"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})
    trim: float | None = setting(
        None, "cut off at each end: a number (>= 1) or a share of the cohort (< 0.5); none: f", ge=0
    )

    @field_validator("trim")
    @classmethod
    def _leaves_something(cls, trim: float | None) -> float | None:
        if trim is not None and 0.5 <= trim < 1:
            raise ValueError("a share of 0.5 or more leaves nothing between the ends")
        return whole_or_share(trim)

    def least(self, f: int) -> int:
        return 2 * max(f, int(self.trim or 0)) + 1  # a share below a half always leaves something

    def idle(self) -> bool:
        return self.f is None and self.trim is None

    def cut(self, n: int, f: int) -> int:
        return f if self.trim is None else how_many(self.trim, n)

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        return Reduced(*trimmed(x, ctx.ids, self.cut(len(x), ctx.assumed)), state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        n, f = x.shape[1], contexts[0].assumed
        if n < self.least(f):
            return self.fall_back_together(x, states, contexts)
        return separate(*trimmed(x, ids_of(contexts), self.cut(n, f)), states)


def trimmed(x: Tensor, ids: Tensor, q: int) -> tuple[Tensor, Tensor]:
    """The means without the q largest and smallest values, and each row's share of what was averaged."""
    order, value = by_id(ids, x), torch.empty_like(x[..., 0, :])
    kept = torch.zeros_like(order)
    for columns in blocks(x):
        value[..., columns], found = _between(*columns_in_order(x, order, columns), q)
        kept += found
    return value, spread(total(kept), order, x.dtype)


def _between(values: Tensor, places: Tensor, q: int) -> tuple[Tensor, Tensor]:
    """The means, and at how many coordinates each client's value was in them: where it was not cut off, which
    are fewer to count."""
    d, n = values.shape[-2:]
    cut = torch.cat([places[..., :q], places[..., n - q :]], dim=-1)
    return values[..., q : n - q].mean(dim=-1), d - tally(cut, n)
