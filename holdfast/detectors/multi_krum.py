"""Multi-Krum's choice as a detector (Blanchard et al., NeurIPS 2017, section 4): the clients that it would
not average are suspicious, and any method and aggregator go on with the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import field_validator
from torch import Tensor

from holdfast.aggregators.base import how_many, whole_or_share
from holdfast.aggregators.geometry import distances
from holdfast.aggregators.krum import PAPER, crowding
from holdfast.aggregators.multi_krum import Nearest
from holdfast.core.columns import Reads
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.detectors.selecting import Choice, Selecting


@register("detector", "multi-krum", paper=PAPER)
class MultiKrum(Nearest, Selecting):
    """Rejects the f clients whose models are farthest from their n - f - 2 nearest others (Krum's score), in
    every round, whether or not there are attackers.

    With fewer than 2f + 3 clients no client is rejected. `keep` rejects all but so many. Krum's score is
    recorded."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "suspicious": "the f clients with the worst Krum scores",
        "scores": "`crowding`: Krum's score",
        "keeps, asks": "",
        "settings": "`f`, a share or a number; `keep`, `variant`, `iterative` as in the aggregator",
        "from": "Blanchard et al. 2017",
    }
    reads: ClassVar[Reads] = "gram"
    f: float = setting(0.2, "assumed attackers: a number (>= 1) or a share of the cohort (< 1)", ge=0)

    @field_validator("f")
    @classmethod
    def _sensible(cls, f: float) -> float | None:
        if 0.5 <= f < 1:
            raise ValueError("needs n >= 2f + 3, which no cohort meets with half of the clients; lower it")
        return whole_or_share(f)

    def choose(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Choice:
        n = len(models)
        f, far = how_many(self.f, n), distances(models).cpu()
        if n < 2 * f + 3:
            nobody = torch.zeros(n, dtype=torch.bool)
            return Choice(nobody, str, {"crowding": torch.full((n,), torch.nan)}, telling=False)
        scores = crowding(far, n - f - 2)
        suspicious = torch.ones(n, dtype=torch.bool).index_fill_(0, self.chosen(far, ids, f), False)
        return Choice(suspicious, lambda row: f"Krum's score is {scores[row]:.4g}", {"crowding": scores})
