"""Multi-Krum: the mean of the m updates with the best Krum scores (Blanchard et al., NeurIPS 2017, section
4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.aggregators.geometry import distances, weighted
from holdfast.aggregators.krum import PAPER, crowding, one_by_one
from holdfast.aggregators.ordered import equal_weights, lowest
from holdfast.core.columns import Reads
from holdfast.core.registry import Part, register, setting
from holdfast.core.types import State


class Nearest(Part):
    """Which updates are chosen, by their distances: the settings of the aggregator `multi-krum` and of the
    detector of the same name."""

    variant: Literal["paper", "authors"] = setting(
        "paper", "paper: the best scores; authors: the best client and its nearest (FedCPA)"
    )
    keep: int | None = setting(None, "how many updates are averaged; none: n - f", ge=1)
    iterative: bool = setting(False, "score the updates that are left again after each choice")

    def chosen(self, far: Tensor, ids: Tensor, f: int) -> Tensor:
        """The rows that are kept, by the squared distances [..., n, n] of all."""
        n = far.shape[-1]
        m = min(self.keep or n - f, n)
        if self.variant == "authors":
            far = far.sqrt()
            best = lowest(crowding(far, n - f - 1), 1, ids)
            its = far.take_along_dim(best[..., None], dim=-2)[..., 0, :]
            return lowest(its.scatter(-1, best, -1.0), m, ids)  # itself before an equal one
        if self.iterative:
            return one_by_one(far, f, m, ids)
        return lowest(crowding(far, n - f - 2), m, ids)


@register("aggregator", "multi-krum", paper=PAPER)
class MultiKrum(Nearest, Aggregator):
    """The mean of the n - f updates that lie closest to their n - f - 2 nearest others.

    `variant = "authors"` is what FedCPA's code runs under this name: plain distances instead of squared ones,
    the best client, and those nearest to it. The weights returned are equal ones on the updates that were
    averaged."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "mean of the n - f best Krum scores",
        "weights returned": "equal, on those averaged",
        "variants and options": (
            '`variant = "authors"`: the best client and its nearest, by plain distances (FedCPA\'s '
            "code); `iterative`: scores again after each choice; `keep`"
        ),
        "paper": "Blanchard et al. 2017",
    }
    reads: ClassVar[Reads] = "gram"
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n > 2f + 2"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})

    def least(self, f: int) -> int:
        return 2 * f + 3

    def idle(self) -> bool:
        return self.f is None and self.keep is None

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        weights = self.shares(x, ctx.ids, ctx.assumed)
        return Reduced(weighted(weights, x), weights, state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        weights = self.shares(x, ids_of(contexts), contexts[0].assumed)
        return separate(weighted(weights, x), weights, states)

    def shares(self, x: Tensor, ids: Tensor, f: int) -> Tensor:
        return equal_weights(self.chosen(distances(x), ids, f), x)
