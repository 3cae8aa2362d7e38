"""The frame of detectors that look at the models of a round and choose: a choice names suspicious clients
with a reason each, and what follows is the same for all (patience.py). Models that are not finite are
suspicious in any case, and are taken out first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.core.device import to_device
from holdfast.core.types import State, Steps
from holdfast.detectors.base import Detector, Judgement
from holdfast.detectors.computations import Sound
from holdfast.detectors.patience import NOT_FINITE, Patient


@dataclass(frozen=True)
class Choice:
    """Which of the models are suspicious, why (by row), the scores, and what to remember; `telling` is false
    where the models could not be told apart."""

    suspicious: Tensor
    reason: Callable[[int], str]
    scores: Mapping[str, Tensor]
    state: State = field(default_factory=dict)
    telling: bool = True


class Selecting(Patient, Detector):
    """A subclass defines `choose`."""

    def choose(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Choice:
        """`models` are finite, and at least one; `ctx.probe`, where there is one, is about these."""
        raise TypeError(f"{type(self).__name__} does not define how it chooses")

    def judge(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Steps[Judgement]:
        sound = yield Sound(models)
        rows = sound.nonzero().flatten()
        reasons = {row: NOT_FINITE for row in (~sound).nonzero().flatten().tolist()}
        scores: dict[str, Tensor] = {}
        own, telling = state, True
        if len(rows):
            kept, seen = models, ctx
            if reasons:
                kept, seen = models[to_device(rows, models.device)], _of_rows(ctx, rows)
            found = self.choose(state, seen, kept, ids[rows])
            own, telling = dict(found.state), found.telling
            for place in found.suspicious.nonzero().flatten().tolist():
                reasons[int(rows[place])] = found.reason(place)
            for name, score in found.scores.items():
                laid_out = torch.full((len(ids),), torch.inf, dtype=torch.float64)
                scores[name] = laid_out.index_copy_(0, rows, score.double().cpu())
        memory, banned, rejected = self.decided(state, ids, reasons, telling)
        return Judgement({**own, **memory}, banned, scores, rejected)


def _of_rows(ctx: Any, rows: Tensor) -> Any:
    """What a choice may know, for some of the models."""
    probe = getattr(ctx, "probe", None)
    return ctx if probe is None else replace(ctx, probe=probe.only(rows))
