"""FedAdam: Adam on the server (Reddi et al., ICLR 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from holdfast.core.registry import register, setting
from holdfast.server_optimizers.adaptive import PAPER, Adaptive


@register("server", "fedadam", paper=PAPER)
class FedAdam(Adaptive):
    """Adam on the server: v <- beta2 v + (1 - beta2) aggregate^2, w <- w + lr m / (sqrt(v) + tau).

    Algorithm 2 of the paper: m <- beta1 m + (1 - beta1) aggregate, m begins at 0 and v at tau^2, and there is
    no bias correction. The paper uses beta1 = 0.9, beta2 = 0.99 and mostly tau = 0.001, and tunes lr for
    every task; 0.01 is only a start. Flower's FedAdam (1.41) begins v at 0 and multiplies lr in round t by
    sqrt(1 - beta2^(t+1)) / (1 - beta1^(t+1)), a bias correction that the paper does not have; so the two
    differ most in the first rounds."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "step": "w + lr m / (sqrt(v) + tau), with v <- beta2 v + (1 - beta2) aggregate^2",
        "settings, with their defaults": "`lr` 0.01, `beta1` 0.9, `beta2` 0.99, `tau` 0.001",
    }
    lr: float = setting(0.01, "eta: learning rate of the server", gt=0)
    beta2: float = setting(0.99, "share of the last v that stays", ge=0, lt=1)

    def second_moment(self, v: Tensor, squares: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squares
