"""FedAvgM: server momentum (Hsu, Qi and Brown 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.server_optimizers.base import ServerOptimizer, Step

PAPER = (
    "Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual"
    " Classification, 2019"
)


@register("server", "fedavgm", paper=PAPER)
class FedAvgM(ServerOptimizer):
    """SGD with momentum on the server: m <- momentum * m + aggregate, w <- w + lr * m.

    The aggregate enters m in full (no factor 1 - momentum), as in the paper and in Flower. With momentum = 0
    and lr = 1 it is FedAvg. Reddi et al. (ICLR 2021) compare with this rule, with momentum 0.9."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "step": "w + lr m, with m <- momentum m + aggregate",
        "settings, with their defaults": "`lr` 1, `momentum` 0.9",
    }
    momentum: float = setting(0.9, "share of the last m that stays", ge=0, lt=1)

    def step(self, aggregate: Tensor, state: State) -> Step:
        m = self.momentum * state.get("m", torch.zeros_like(aggregate)) + aggregate
        return Step(self.lr * m, {"m": m})
