"""Bulyan: Krum's choices, and of them in each coordinate only the values around the median (El Mhamdi et al.,
ICML 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.aggregators.geometry import blocks, distances, total
from holdfast.aggregators.krum import one_by_one
from holdfast.aggregators.ordered import around_the_median, by_id, columns_in_order
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.registry import register
from holdfast.core.types import State

PAPER = (
    "El Mhamdi, Guerraoui and Rouault, The Hidden Vulnerability of Distributed Learning in Byzantium, ICML"
    " 2018"
)


@register("aggregator", "bulyan", paper=PAPER)
class Bulyan(Aggregator):
    """n - 2f updates are chosen by repeated Krum; every coordinate is the mean of the n - 4f of their values
    nearest to their median.

    Meant for attackers that change few coordinates of an otherwise close update by much, which Krum alone
    accepts. The weight returned is each client's share of the values that were averaged."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": (
            "n - 2f choices of repeated Krum; of each coordinate the n - 4f values nearest to the median"
        ),
        "weights returned": "share of the values averaged",
        "paper": "El Mhamdi et al. 2018",
    }
    reads: ClassVar[Reads] = "gram"
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n >= 4f + 3"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})

    def least(self, f: int) -> int:
        return 4 * f + 3

    def idle(self) -> bool:
        return self.f is None

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        return Reduced(*chosen_and_trimmed(x, ctx.ids, ctx.assumed), state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        return separate(*chosen_and_trimmed(x, ids_of(contexts), contexts[0].assumed), states)


def chosen_and_trimmed(x: Tensor, ids: Tensor, f: int) -> tuple[Tensor, Tensor]:
    n, ids = x.shape[-2], to_device(ids, x.device)
    chosen = one_by_one(distances(x), f, n - 2 * f, ids)
    order = chosen.gather(-1, by_id(ids.gather(-1, chosen), x))
    value, counts = torch.empty_like(x[..., 0, :]), torch.zeros_like(order)
    for columns in blocks(x):
        value[..., columns], found = around_the_median(*columns_in_order(x, order, columns), n - 4 * f)
        counts += found
    counts = total(counts)
    shares = (counts.double() / counts.sum(dim=-1, keepdim=True)).to(x.dtype)
    return value, x.new_zeros(x.shape[:-1]).scatter_(-1, order, shares)
