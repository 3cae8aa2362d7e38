"""FedYogi: Yogi on the server (Reddi et al., ICLR 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from holdfast.core.registry import register, setting
from holdfast.server_optimizers.adaptive import PAPER, Adaptive


@register("server", "fedyogi", paper=PAPER)
class FedYogi(Adaptive):
    """Yogi on the server: v <- v - (1 - beta2) aggregate^2 sign(v - aggregate^2), w <- w + lr m / (sqrt(v) +
    tau).

    v moves towards the square by a part of the square, never of v, so it falls slowly after large updates.
    Algorithm 2 of the paper: m <- beta1 m + (1 - beta1) aggregate, m begins at 0 and v at tau^2, no bias
    correction; beta1 = 0.9, beta2 = 0.99, and lr is tuned for every task; 0.01 is only a start. Flower's
    FedYogi begins v at 0, else it is the same."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "step": ("w + lr m / (sqrt(v) + tau), with v <- v - (1 - beta2) aggregate^2 sign(v - aggregate^2)"),
        "settings, with their defaults": "`lr` 0.01, `beta1` 0.9, `beta2` 0.99, `tau` 0.001",
    }
    lr: float = setting(0.01, "eta: learning rate of the server", gt=0)
    beta2: float = setting(0.99, "1 - beta2 is the share of the squares by which v moves", ge=0, lt=1)

    def second_moment(self, v: Tensor, squares: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squares * (v - squares).sign()
