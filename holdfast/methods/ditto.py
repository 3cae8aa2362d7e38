"""Ditto. Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML
2021. Eq. 2: beside the global w (by FedAvg), client k keeps v_k that minimises F_k(v) + lambda/2 ||v -
w_t||^2 (Algorithm 1). v_k is pulled to the received w_t, which is frozen: training w and v on the same
batches is one stack of two models per client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.local.client import Local, Received
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Fields, Method


class DittoClient(ClientRule):
    """Train the received w for the server and the private v for the client itself."""

    only_fit = True
    models_per_client = 2

    def trainings(self) -> Mapping[str, int]:
        return {"train/fit": 2}

    def init(self, local: Local) -> State:
        return {"personal": local.initial}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        pull = torch.cat([torch.zeros_like(local.settings.lam), local.settings.lam])
        both = local.fit(torch.cat([received.model, state["personal"]]), pull=(received.model, pull))
        w, v = both.model.split(local.n)
        return {"personal": v}, local.report(w, received, both)

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return state["personal"]


@register(
    "method",
    "ditto",
    paper="Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021",
)
class Ditto(Method):
    """A global model by averaging, and a private model per client that is pulled towards it."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "the model",
        "what a client keeps": "a second model, pulled to the received one",
        "personal model": "that second model",
        "what that says, beyond the update itself": "the personal model stays",
    }
    Client = DittoClient
    Server = Averaging
    models = ("global", "personal")
    deploys = "personal"
    search = {"lam": (0.01, 0.1, 1.0, 2.0)}
    lam: float = setting(
        0.1, "strength of the pull of the private model to the received one (0: local training)", ge=0
    )
