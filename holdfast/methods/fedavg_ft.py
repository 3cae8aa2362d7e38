"""FedAvg with fine-tuning: FedAvg's training, but every client is scored with the model it has after its own
local epochs.

FedCAP calls it FedAvg-FT, FedAS FedAvg-P. A client outside the cohort keeps its last own model (`unselected =
"keep_own"`, FedCAP's reading), or is scored with the plain global model (`"deliver"`, what the FedAS
repository does), or trains a copy (`"finetune"`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from holdfast.aggregators.mean import PAPER
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.local.client import Local, Received
from holdfast.local.per_client import plain
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Fields, Method


class FedAvgFtClient(ClientRule):
    """FedAvg's client that remembers its own trained model."""

    only_fit = True

    def init(self, local: Local) -> State:
        return {"own": local.initial}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        mu = local.settings.mu
        pulled = bool((plain(mu) != 0).any())  # a client with mu = 0 is not pulled
        fitted = local.fit(received.model, pull=(received.model, mu) if pulled else None)
        return {"own": fitted.model}, local.report(fitted.model, received, fitted)

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return state["own"]


@register("method", "fedavg-ft", paper=PAPER)
class FedAvgFt(Method):
    """FedAvg, scored after each client's own local training: the simplest personalisation. With `mu` above 0,
    the same of FedProx."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "the model",
        "what a client keeps": "what it trained",
        "personal model": "what it trained",
        "what that says, beyond the update itself": "the tuned model stays",
    }
    Client = FedAvgFtClient
    Server = Averaging
    models = ("global", "personal")
    deploys = "personal"
    mu: float = setting(
        0.0, "strength of a pull to the received model, as in fedprox (FedAS's FedProx-P: 0.1)", ge=0
    )
