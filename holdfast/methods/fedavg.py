"""FedAvg. McMahan, Moore, Ramage, Hampson, Agueera y Arcas: Communication-Efficient Learning of Deep Networks
from Decentralized Data, AISTATS 2017. Algorithm 1: w_{t+1} = sum_k n_k / n * w_k, each w_k trained for E
epochs from w_t."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from holdfast.aggregators.mean import PAPER
from holdfast.core.registry import register
from holdfast.core.types import State
from holdfast.local.client import Local, Received
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Fields, Method


class FedAvgClient(ClientRule):
    """Train the received model, send the difference."""

    only_fit = True

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        fitted = local.fit(received.model)
        return state, local.report(fitted.model, received, fitted)


@register("method", "fedavg", paper=PAPER)
class FedAvg(Method):
    """One model for all: the average of what the clients trained. The usual baseline."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "the model",
        "what a client keeps": "nothing",
        "personal model": "none: the global one",
        "what that says, beyond the update itself": "nothing more",
    }
    Client = FedAvgClient
    Server = Averaging
