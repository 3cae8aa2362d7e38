"""FedAdagrad: Adagrad on the server (Reddi et al., ICLR 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from holdfast.core.registry import register, setting
from holdfast.server_optimizers.adaptive import PAPER, Adaptive


@register("server", "fedadagrad", paper=PAPER)
class FedAdagrad(Adaptive):
    """Adagrad on the server: v <- v + aggregate^2, w <- w + lr m / (sqrt(v) + tau).

    Algorithm 2 of the paper: v begins at tau^2, and m <- beta1 m + (1 - beta1) aggregate; the paper's
    experiments use no momentum, beta1 = 0, so that m is the aggregate. The paper tunes lr for every task;
    0.1 is only a start. Flower's FedAdagrad begins v at 0, else it is the same."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "step": "w + lr m / (sqrt(v) + tau), with v <- v + aggregate^2",
        "settings, with their defaults": "`lr` 0.1, `beta1` 0, `tau` 0.001",
    }
    lr: float = setting(0.1, "eta: learning rate of the server", gt=0)
    beta1: float = setting(0.0, "share of the last m that stays; 0: m is the aggregate", ge=0, lt=1)

    def second_moment(self, v: Tensor, squares: Tensor) -> Tensor:
        return v + squares
