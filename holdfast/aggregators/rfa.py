"""RFA: the geometric median of the updates by the smoothed Weiszfeld algorithm (Pillutla et al., IEEE TSP
2022, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.geometry import norms, seen_from, to_mixture
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = (
    "Pillutla, Kakade and Harchaoui, Robust Aggregation for Federated Learning, IEEE Transactions on Signal"
    " Processing 2022"
)


@register("aggregator", "rfa", paper=PAPER)
class RFA(Aggregator):
    """The point with the smallest weighted sum of distances to all updates: less than half of the weight
    cannot move it arbitrarily far.

    From the weighted mean on, each update counts by its weight over its distance to the point before, until
    no distance changes. The weights returned are those of the last step; layer by layer (FedCAP's code) their
    mean over all coordinates."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "geometric median, by the smoothed Weiszfeld algorithm",
        "weights returned": "those of the last step",
        "variants and options": (
            "`per_layer`: one for each tensor (FedCAP's code); `smoothing`, `iterations`, `tolerance`"
        ),
        "paper": "Pillutla et al. 2022",
    }
    condition: ClassVar[str] = "n > 2f"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})
    smoothing: float = setting(1e-6, "smallest distance that is used", gt=0)
    iterations: int = setting(100, "largest number of steps", ge=1)
    tolerance: float = setting(1e-6, "stop when no distance changes by more than this share", ge=0)
    per_layer: bool = setting(
        False, "one geometric median for each tensor instead of one for the whole update"
    )

    def least(self, f: int) -> int:
        return 2 * f + 1

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        value, weights = torch.empty_like(x[0]), torch.zeros_like(w)
        for part in (
            [slice(s.start, s.stop) for s in ctx.layout.slots] if self.per_layer else [slice(0, x.shape[1])]
        ):
            value[part], used = self.middle(x[:, part], w.double())
            weights += used.to(w.dtype) * ((part.stop - part.start) / x.shape[1])
        return Reduced(value, weights, state)

    def middle(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Most often a few steps are enough. Where they are not, the products of all updates are computed,
        which takes as long as a few steps and gives the distance of each from every point between them; where
        that is too coarse, they are computed again."""
        weights = w / w.sum()
        far = norms(x, weights.to(x.dtype) @ x).clamp_(min=self.smoothing)
        patience = 4 + len(x) // 25
        seen, look = None, patience
        for i in range(self.iterations):
            weights = w / far
            weights = weights / weights.sum()
            squares = None
            if seen is not None:
                between, exact = to_mixture(seen, weights)
                squares = between if bool(exact) else None
            if squares is None and i >= look:
                seen, look = seen_from(x, weights.to(x.dtype) @ x), i + patience
                squares = seen.diagonal()
            now = norms(x, weights.to(x.dtype) @ x) if squares is None else squares.sqrt()
            before, far = far, now.clamp_(min=self.smoothing)
            if bool(((far - before).abs() <= self.tolerance * before).all()):
                break
        return weights.to(x.dtype) @ x, weights
