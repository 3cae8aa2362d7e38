"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks,
MLSys 2020. Eq. 2: each client minimises F_k(w) + mu/2 ||w - w_t||^2, so a step is w <- w - eta (grad F_k(w) +
mu (w - w_t))."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.local.client import Local, Received
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Fields, Method


class FedProxClient(ClientRule):
    """Train the received model while being pulled back to it."""

    only_fit = True

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        fitted = local.fit(received.model, pull=(received.model, local.settings.mu))
        return state, local.report(fitted.model, received, fitted)


@register(
    "method", "fedprox", paper="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"
)
class FedProx(Method):
    """FedAvg whose clients are pulled back to the received model, so that heterogeneous data drift less."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "the model",
        "what a client keeps": "nothing",
        "personal model": "none: the global one",
        "what that says, beyond the update itself": "nothing more",
    }
    Client = FedProxClient
    Server = Averaging
    search = {"mu": (0.001, 0.01, 0.1, 1.0)}
    mu: float = setting(
        0.1, "strength of the pull to the received model (paper: 0.001 to 1; 0 is FedAvg)", ge=0
    )
