"""FedCPA's score as a detector (Han et al., ICCV 2023, section 5): a client that gets no weight by the
normality of its model is rejected, and any method and aggregator go on with the rest. The score and its
settings are those of the aggregator `fedcpa`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.aggregators.normality import PAPER, Models, Scoring
from holdfast.core.registry import register, setting
from holdfast.core.types import State, Steps
from holdfast.detectors.base import Detector, Judgement


@register("detector", "normality", paper=PAPER)
class Normality(Scoring, Detector):
    """Rejects clients whose most and least important parameters differ from those of the others.

    The scores are scaled by the cohort's own extremes, so in every round some client has weight 0, honest or
    not: rejecting costs such a client one round; a ban should need several rounds in a row. With fewer than
    three clients, or equal scores, no client is rejected."""

    at_most: float = setting(0.0, "a weight (lambda, 0 to 1) of no more than this is suspicious", ge=0, lt=1)
    action: Literal["reject", "ban"] = setting(
        "reject", "leave suspicious clients out of this round, or ban them in the end as well"
    )
    patience: int = setting(3, "ban: after so many suspicious rounds of a client in a row", ge=1)

    def judge(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Steps[Judgement]:
        yield from ()  # it asks no client
        reference = ctx.reference.to(models.dtype)
        found = self.score(
            Models(models, ids, reference, ctx.wire.layout(ctx.layout), to_change=-reference), state
        )
        suspicious = ~found.usable | (found.weights <= self.at_most) & found.telling
        memory, streak = _counted(state, ids, suspicious, found.telling)
        banned, rejected = {}, {}
        for row in suspicious.nonzero().flatten().tolist():
            reason = (
                f"weight {found.weights[row]:.3g} by normality"
                if found.usable[row]
                else "model is not finite"
            )
            if self.action == "ban" and streak[row] >= self.patience:
                banned[int(ids[row])] = f"{reason}, {streak[row]} rounds in a row"
            else:
                rejected[int(ids[row])] = reason
        scores = {"abnormality": -found.normality, "distrust": 1 - found.weights}
        return Judgement({**found.state, **memory}, banned, scores, rejected)


def _counted(state: State, ids: Tensor, suspicious: Tensor, telling: bool) -> tuple[State, Tensor]:
    """How many rounds in a row each client was suspicious, and those of this round's clients. A round without
    usable scores does not count."""
    known, streak = state.get("ids", ids[:0]), state.get("streak", ids[:0])
    everyone = torch.cat([known, ids]).unique()
    counts = torch.zeros_like(everyone).index_copy_(0, torch.searchsorted(everyone, known), streak)
    mine = torch.searchsorted(everyone, ids)
    if telling or bool(suspicious.any()):
        counts[mine] = torch.where(suspicious, counts[mine] + 1, 0 if telling else counts[mine])
    return {"ids": everyone, "streak": counts}, counts[mine]
