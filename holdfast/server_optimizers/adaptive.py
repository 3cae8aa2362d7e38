"""What FedAdagrad, FedAdam and FedYogi share (Reddi et al., ICLR 2021, Algorithm 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.core.registry import setting
from holdfast.core.types import State
from holdfast.server_optimizers.base import ServerOptimizer, Step

PAPER = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"


class Adaptive(ServerOptimizer):
    """m <- beta1 m + (1 - beta1) aggregate; w <- w + lr m / (sqrt(v) + tau). How v follows the squares of the
    aggregate is what the three differ in. m begins at 0 and v at tau^2, the least that Algorithm 2 allows; as
    there, neither is corrected for its start."""

    beta1: float = setting(0.9, "share of the last m that stays", ge=0, lt=1)
    tau: float = setting(1e-3, "degree of adaptivity: added to sqrt(v), and v begins at tau^2", gt=0)

    def step(self, aggregate: Tensor, state: State) -> Step:
        m = state.get("m", torch.zeros_like(aggregate))
        v = state.get("v", torch.full_like(aggregate, self.tau**2))
        m = self.beta1 * m + (1 - self.beta1) * aggregate
        v = self.second_moment(v, aggregate.square())
        return Step(self.lr * m / (v.sqrt() + self.tau), {"m": m, "v": v})

    def second_moment(self, v: Tensor, squares: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define its second moment")
