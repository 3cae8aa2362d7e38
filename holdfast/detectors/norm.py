"""The norm test (FedCAP, Li et al., ACSAC 2024, section on anomaly detection): a client too far from the
reference model is banned.

The norm is that of the trainable, travelling entries of a client's model minus the reference model: with one
model for all this is the client's update, with customised models FedCAP's calibrated update. FedCAP's bound
of 10 is tied to a network of a few hundred thousand parameters; for any other, a multiple of the cohort's
median norm is the better unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from holdfast.aggregators.similarity import Lengths
from holdfast.core.columns import Reads
from holdfast.core.registry import register, setting
from holdfast.core.screening import NOT_FINITE
from holdfast.core.types import State, Steps
from holdfast.detectors.base import Detector, Judgement

PAPER = (
    "Li et al., FedCAP: Robust Federated Learning via Customized Aggregation and Personalization, ACSAC 2024"
)
_NOT_FINITE = f"update {NOT_FINITE}"


@register("detector", "norm", paper=PAPER)
class Norm(Detector):
    """Bans clients whose update has a norm above a threshold, or is not finite."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "suspicious": "updates longer than a bound, or not finite; they are banned at once",
        "scores": "`norm`: the length",
        "keeps, asks": "",
        "settings": "`threshold`, `unit`: absolute, or median lengths",
        "from": "Li et al. 2024 (FedCAP)",
    }
    reads: ClassVar[Reads] = "gram"
    threshold: float = setting(10.0, "largest length of an update that passes", gt=0)
    unit: Literal["absolute", "median"] = setting(
        "absolute", "unit of the threshold: absolute, or the cohort's median norm"
    )

    @model_validator(mode="after")
    def _above_the_median(self) -> Norm:
        if self.unit == "median" and self.threshold < 1:
            raise ValueError("threshold below 1 median norm would ban half of any cohort; set 2, for example")
        return self

    def judge(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Steps[Judgement]:
        lengths = yield Lengths(models, ctx.reference)  # it asks no client
        lengths = lengths.nan_to_num(nan=torch.inf, posinf=torch.inf)
        bound = self.bound(lengths)
        far = {
            i: length
            for i, length in zip(ids.tolist(), lengths.tolist(), strict=True)
            if length > bound or math.isinf(length)
        }
        banned = {i: _reason(length, bound) for i, length in far.items()}
        banned |= {
            i: reason for i, reason in ctx.refused.items() if reason == _NOT_FINITE
        }  # screening took these out before
        return Judgement(state, banned, {"norm": lengths})

    def bounds(self, scores: Mapping[str, Tensor]) -> Mapping[str, float]:
        return {"norm": self.bound(scores["norm"])}

    def bound(self, lengths: Tensor) -> float:
        """A median needs three clients, or the longer of two would be banned for being longer; and where most
        updates are zero, all others would be."""
        if self.unit == "absolute":
            return self.threshold
        finite = lengths[lengths.isfinite()]
        middle = float(finite.quantile(0.5)) if len(finite) > 2 else 0.0
        return self.threshold * middle if middle > 0 else torch.inf


def _reason(length: float, bound: float) -> str:
    return _NOT_FINITE if math.isinf(length) else f"update of norm {length:.4g} is above {bound:.4g}"
