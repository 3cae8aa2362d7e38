"""RLR, the robust learning rate: coordinates on which too few clients agree move backwards (Ozdayi,
Kantarcioglu and Gel, AAAI 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import field_validator
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, separate, whole_or_share
from holdfast.aggregators.geometry import blocks, weighted
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = (
    "Ozdayi, Kantarcioglu and Gel, Defending against Backdoors in Federated Learning with Robust Learning"
    " Rate, AAAI 2021"
)


@register("aggregator", "rlr", paper=PAPER)
class RLR(Aggregator):
    """The weighted mean, with the sign turned at every coordinate where the signs of the updates add up to
    less than theta.

    The server's learning rate is 1 where |sum of sign(x_i)| >= theta and -1 elsewhere, which leads the model
    away from what only some clients want, such as a backdoor. theta has to be above f, else attackers reach
    it by themselves, and at most n - 2f, else they can turn a coordinate on which all honest clients agree;
    honest clients whose data differ much agree on few coordinates, and RLR then turns most of the model. The
    mean is not robust by itself: nothing bounds the length of an update (`clip` does). The authors' scripts
    have theta = 4 of 10 clients and 8 of 40. The weights returned are the incoming ones."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": (
            "weighted mean, turned around at coordinates where too few signs agree; for backdoors"
        ),
        "weights returned": "the incoming ones",
        "variants and options": "`threshold`: theta, a number of clients or a share of the cohort",
        "paper": "Ozdayi et al. 2021",
    }
    reads: ClassVar[Reads] = "columns"
    coordinatewise: ClassVar[bool] = True
    condition: ClassVar[str] = "n >= 2f + theta and theta > f"
    keeps: ClassVar[frozenset[str]] = frozenset({"scale"})
    threshold: float = setting(
        0.4, "theta: how far signs must add up: a number (>= 1), or a share of the cohort (< 1)", gt=0
    )

    @field_validator("threshold")
    @classmethod
    def _a_count(cls, threshold: float) -> float:
        whole_or_share(threshold)
        return threshold

    def theta(self, n: int) -> int:
        """In clients; a share is rounded up."""
        return int(self.threshold) if self.threshold >= 1 else math.ceil(self.threshold * n - 1e-9)

    def least(self, f: int) -> int:
        if self.threshold >= 1:
            return 2 * f + self.theta(1) if self.theta(1) > f else 10**9
        n = max(1, int(f / self.threshold), int(2 * f / (1 - self.threshold))) - 1
        while n < 1 or not f < self.theta(n) <= n - 2 * f:
            n += 1
        return n

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        w = to_device(w, x.device)
        return Reduced(self.turned(x, w), w, state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        w = to_device(w, x.device)
        return separate(self.turned(x, w), w, states)

    def turned(self, x: Tensor, w: Tensor) -> Tensor:
        value = weighted(w, x)
        for columns in blocks(x):
            agree = x[..., columns].sign().sum(dim=-2).abs() >= self.theta(x.shape[-2])
            value[..., columns] = torch.where(agree, value[..., columns], -value[..., columns])
        return value
