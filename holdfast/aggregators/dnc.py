"""Divide-and-conquer: leaves out the updates that deviate most along the direction of largest spread
(Shejwalkar and Houmansadr, NDSS 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.ordered import by_id, equal_weights
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = (
    "Shejwalkar and Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses,"
    " NDSS 2021"
)


@register("aggregator", "dnc", paper=PAPER)
class DnC(Aggregator):
    """The mean without the c f updates that deviate most along the first principal direction, in any of
    several passes.

    Each pass uses a random subset of the coordinates; an update that is left out once stays out. Assumes that
    what attackers have in common is the largest spread there is. Where no update is left, the median is the
    fallback. The weights returned are equal ones on the updates that were averaged."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": (
            "leaves out updates that deviate along the first principal direction of random coordinates"
        ),
        "weights returned": "equal, on those averaged",
        "variants and options": "`iterations`, `coordinates`, `c`",
        "paper": "Shejwalkar and Houmansadr 2021",
    }
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n > 2f and n > c f"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})
    iterations: int = setting(5, "number of subsets of coordinates", ge=1)
    coordinates: int = setting(10_000, "most coordinates in a subset", ge=1)
    c: float = setting(1.0, "updates left out for each assumed attacker", gt=0)

    def least(self, f: int) -> int:
        return max(2 * f, int(self.c * f)) + 1

    def idle(self) -> bool:
        return self.f is None

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        n, d = x.shape
        if n < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        keep, order = n - int(self.c * ctx.assumed), by_id(ctx.ids, x)
        good = torch.ones(n, dtype=torch.bool, device=x.device)
        for step in range(self.iterations if keep < n else 0):
            some = (
                ctx.key.fold("coordinates", step)
                .hash(d)
                .topk(min(d, self.coordinates), largest=False)
                .indices.to(x.device)
            )
            scores = _standing_out(
                x[order[:, None], some].double()
            )  # in the order of ids: equal updates stay equal in any order of replies
            good &= torch.zeros_like(good).index_fill_(0, order[scores.argsort(stable=True)[:keep]], True)
            if d <= self.coordinates:
                break  # the next pass would use the same coordinates
        if not bool(good.any()):
            return self.fall_back(x, state, ctx)
        weights = equal_weights(good.nonzero().flatten(), x)
        return Reduced(weights @ x, weights, state)


def _standing_out(x: Tensor) -> Tensor:
    """Squared projections on the top right singular vector of the centred rows, from the [n, n] product
    instead of a decomposition. Writes into x."""
    x -= x.mean(dim=0)
    scale = torch.stack(x.aminmax()).abs().max()
    x /= torch.where(scale > 0, scale, 1)
    return torch.linalg.eigh(x @ x.T).eigenvectors[:, -1].square()
