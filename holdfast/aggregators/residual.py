"""Residual-based reweighting: in each coordinate a line through the ordered values shows which values are off
(Fu et al., 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.aggregators.geometry import blocks, only, over_columns, weighted
from holdfast.aggregators.ordered import by_id, columns_in_order
from holdfast.core.columns import Reads
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = "Fu et al., Attack-Resistant Federated Learning with Residual-based Reweighting, 2019"


@register("aggregator", "residual", paper=PAPER)
class Residual(Aggregator):
    """Values far from the repeated-median line rank -> value cost a client confidence; where confidence is
    low the line replaces them.

    Per coordinate: the slope is the median of the medians of pairwise slopes; residuals r over tau = 1.4826
    (1 + 5 / (n - 1)) median |r| and over sqrt(1 - leverage) give the confidence min(1, lambda sqrt(2 / n) /
    |e|). A client's weight is the square of its confidences' sum, where coordinates on which clients differ
    more count more. Assumes that honest values lie about evenly spread. Where all clients have full
    confidence everywhere, weights are equal. `variant = "authors"` leaves the smallest |r| out of the median,
    as both codes do. Work grows with n^2 d, so coordinates are taken in blocks."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": ("distance to a line through the ordered values of each coordinate costs confidence"),
        "weights returned": "squared sums of confidence, as shares",
        "variants and options": (
            '`variant = "authors"`: the smallest residual left out of tau; `strictness`, `threshold`'
        ),
        "paper": "Fu et al. 2019",
    }
    reads: ClassVar[Reads] = "columns"
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n >= 3 and n > 2f"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})
    variant: Literal["paper", "authors"] = setting(
        "paper", "paper: tau from all residuals; authors: without the smallest"
    )
    strictness: float = setting(2.0, "lambda: a smaller one gives less confidence", gt=0)
    threshold: float = setting(
        0.05, "delta: values with less confidence are replaced by the line's", ge=0, lt=1
    )

    def least(self, f: int) -> int:
        return max(3, 2 * f + 1)

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        return Reduced(*self.reweighted(x, ctx.ids), state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        return separate(*self.reweighted(x, ids_of(contexts)), states)

    def reweighted(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        order, corrected = by_id(ids, x), torch.empty_like(x)
        zero = torch.zeros(order.shape, dtype=torch.float64, device=x.device)

        def of(columns: slice) -> Tensor:
            mine, fixed, trust = only(x, columns), corrected[..., columns], torch.zeros_like(zero)
            for block in blocks(mine, times=x.shape[-2]):
                values, places = columns_in_order(mine, order, block)
                flat = self.confidence(values.flatten(0, -2))
                line, confidence = (part.view(values.shape) for part in flat)
                values = torch.where(confidence < self.threshold, line, values)
                counts = confidence * confidence.std(dim=-1, keepdim=True)
                # rows in the order of ids
                fixed[..., block] = torch.empty_like(values).scatter_(-1, places, values).mT
                trust += torch.empty_like(counts).scatter_(-1, places, counts).double().sum(dim=-2)
            return trust

        trust = over_columns(zero, of)
        most = trust.amax(dim=-1, keepdim=True)
        weights = (trust / most).nan_to_num_(nan=1.0).square_()  # no client differs anywhere: 0 / 0
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        return weighted(weights, corrected), torch.empty_like(weights).scatter_(-1, order, weights)

    def confidence(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """For values [coordinates, n] in ascending order: the line's values and the confidence in each."""
        n = y.shape[1]
        rank = torch.arange(n, dtype=y.dtype, device=y.device)
        steps = (rank[:, None] - rank[None, :]).fill_diagonal_(1)
        slopes = (y[:, :, None] - y[:, None, :]).div_(steps)
        slopes.diagonal(dim1=1, dim2=2).fill_(
            torch.inf
        )  # a client has no slope to itself: last, and not counted
        slope = _median(_ascending(_median(_ascending(slopes), n - 1)), n)
        line = (_median(y, n) - slope * ((n - 1) / 2))[:, None] + slope[:, None] * rank
        residual = (y - line).abs()
        lowest = 1 if self.variant == "authors" else 0
        tau = 1.4826 * (1 + 5 / (n - 1)) * _median(_ascending(residual.clone()), n, lowest) + 1e-7
        off = rank - (n - 1) / 2
        freedom = (1 - 1 / n - off.square() / off.square().sum()).clamp_(min=0).sqrt_()
        return line, (self.strictness * math.sqrt(2 / n) * freedom * tau[:, None] / residual).nan_to_num_(
            nan=1.0
        ).clamp_(max=1)


def _ascending(values: Tensor) -> Tensor:
    """The values along the last axis in order, in place where that can be. NumPy's sort of short rows on a
    CPU takes a small part of the time that PyTorch's does, which also says where each value came from; n^2
    slopes of every coordinate are most of this rule's work."""
    if values.device.type != "cpu":
        return values.sort(dim=-1).values
    values.numpy().sort(axis=-1)
    return values


def _median(values: Tensor, n: int, skip: int = 0) -> Tensor:
    """Over the last axis, of the n smallest values without the first few; of an even number the mean of the
    middle two."""
    low, high = skip + (n - skip - 1) // 2, skip + (n - skip) // 2
    return values[..., low] if low == high else (values[..., low] + values[..., high]) / 2
