"""Centered clipping: updates are shortened towards the last aggregate before they are averaged (Karimireddy
et al., ICML 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, separate, vectors
from holdfast.aggregators.geometry import norms, weighted
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = "Karimireddy, He and Jaggi, Learning from History for Byzantine Robust Optimization, ICML 2021"


@register("aggregator", "centered-clip", paper=PAPER)
class CenteredClip(Aggregator):
    """v <- v + sum of w_i (x_i - v) min(1, radius / |x_i - v|), starting at the last round's aggregate (zero
    in the first).

    No client moves the aggregate by more than its weight times the radius in a step, so the radius has to fit
    the honest updates' spread. The paper averages client momentum; here it is their updates. The weights
    returned are w_i times the clipping, as shares."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "shortens updates towards the last aggregate",
        "weights returned": "the incoming ones times the clipping, as shares",
        "variants and options": "`radius`, `iterations`",
        "paper": "Karimireddy et al. 2021",
    }
    reads: ClassVar[Reads] = "gram"
    condition: ClassVar[str] = "n > 2f"
    radius: float = setting(10.0, "tau: how far from the last aggregate an update counts in full", gt=0)
    iterations: int = setting(1, "steps in a round", ge=1)

    def least(self, f: int) -> int:
        return 2 * f + 1

    def remembers(self) -> str:
        return "model"

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        before = to_device(state["centre"], x.device) if "centre" in state else torch.zeros_like(x[0])
        centre, weights = self.clipped(x, w, before)
        return Reduced(centre, weights, {"centre": centre.clone()})

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        start = torch.zeros_like(x[0, 0])
        centre, weights = self.clipped(x, w, vectors([state.get("centre", start) for state in states], x))
        return separate(centre, weights, [{"centre": kept} for kept in centre.clone()])

    def clipped(self, x: Tensor, w: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
        w = weights = to_device(w, x.device)
        for _ in range(self.iterations):
            weights = w * (self.radius / norms(x, centre)).clamp_(max=1).to(w.dtype)
            centre = (1 - weights.sum(dim=-1, keepdim=True)) * centre + weighted(weights, x)
        return centre, weights / weights.sum(dim=-1, keepdim=True)
