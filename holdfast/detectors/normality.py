"""FedCPA's score as a detector (Han et al., ICCV 2023, section 5): a client that gets no weight by the
normality of its model is rejected, and any method and aggregator go on with the rest. The score and its
settings are those of the aggregator `fedcpa`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from holdfast.aggregators.normality import PAPER, Models, Scoring
from holdfast.core.registry import register, setting
from holdfast.core.types import State, Steps
from holdfast.detectors.base import Detector, Judgement
from holdfast.detectors.patience import NOT_FINITE, Patient


@register("detector", "normality", paper=PAPER)
class Normality(Patient, Scoring, Detector):
    """Rejects clients whose most and least important parameters differ from those of the others.

    The scores are scaled by the cohort's own extremes, so in every round some client has weight 0, honest or
    not: rejecting costs such a client one round; a ban should need several rounds in a row. With fewer than
    three clients, or equal scores, no client is rejected."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "suspicious": "critical parameters other than those of the others (no weight in FedCPA)",
        "scores": "`abnormality`, `distrust`",
        "keeps, asks": "the model sent last",
        "settings": (
            "`at_most`; those of the aggregator `fedcpa`: see [FedCPA](fedcpa.md#the-score-as-a-detector)"
        ),
        "from": "Han et al. 2023",
    }
    at_most: float = setting(0.0, "a weight (lambda, 0 to 1) of no more than this is suspicious", ge=0, lt=1)

    def judge(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Steps[Judgement]:
        yield from ()  # it asks no client
        reference = ctx.reference.to(models.dtype)
        found = self.score(
            Models(models, ids, reference, ctx.wire.layout(ctx.layout), to_change=-reference), state
        )
        suspicious = ~found.usable | (found.weights <= self.at_most) & found.telling
        reasons = {
            row: f"weight {found.weights[row]:.3g} by normality" if found.usable[row] else NOT_FINITE
            for row in suspicious.nonzero().flatten().tolist()
        }
        memory, banned, rejected = self.decided(state, ids, reasons, found.telling)
        scores = {"abnormality": -found.normality, "distrust": 1 - found.weights}
        return Judgement({**found.state, **memory}, banned, scores, rejected)
