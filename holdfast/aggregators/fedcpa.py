"""FedCPA: a client that disagrees with the others about which parameters matter loses weight (Han et al.,
ICCV 2023, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.geometry import weighted
from holdfast.aggregators.normality import PAPER, Models, Scoring
from holdfast.core.device import to_device
from holdfast.core.registry import register
from holdfast.core.types import State


@register("aggregator", "fedcpa", paper=PAPER)
class FedCPA(Scoring, Aggregator):
    """Updates count by how far a client's most and least important parameters are those of the others, and of
    the model's last change.

    Sample counts are ignored. The scores are scaled by the cohort's own extremes, so in every round one
    client has weight 0 and one has full weight, attackers or not, and the sum is divided by how many count at
    all (Eq. 9): an update of partly trusted clients is a shorter one, and BatchNorm's statistics move by the
    same share. In the first round there is no last change, and clients are compared with each other only,
    unless `literal`. Fewer than three usable updates, or scores that are all equal, are averaged as they are,
    and the round counts as a fallback; it takes a majority of attackers for normal. The weights returned are
    lambda over the number of clients that have any."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": (
            "clients lose weight whose most and least important parameters differ from those of the"
            " others and of the model's last change"
        ),
        "weights returned": "lambda over the number of clients with any",
        "variants and options": (
            "`topk`, `bottomk`, `global_`, `local`: leave out a part of the score; `correlation`, "
            '`literal`, `variant = "authors"`: see [FedCPA](fedcpa.md)'
        ),
        "paper": "Han et al. 2023",
    }
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n >= 3 and n > 2f"

    def least(self, f: int) -> int:
        return max(3, 2 * f + 1)

    def remembers(self) -> str:
        return "model" if self.has_memory() else ""

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        received = to_device(ctx.received, x.device)
        models = Models(x, ctx.ids, received, ctx.layout, to_model=received.to(x.dtype))
        found = self.score(models, state)
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, found.state, ctx)
        weights = (found.weights / max(1, int((found.weights > 0).sum()))).to(x)  # Eq. 9
        usable = found.usable.to(x.device)
        value = (
            weighted(weights, x) if bool(usable.all()) else weighted(weights[usable], x[usable])
        )  # nothing times infinity is not a number
        return Reduced(value, weights, found.state, fallback=not found.telling, partial=True)
