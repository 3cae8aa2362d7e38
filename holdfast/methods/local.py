"""Local training: every client alone; no model is sent, only the training loss. The baseline that any
federation has to beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.core.flat import Wire
from holdfast.core.registry import register, setting
from holdfast.core.types import Exchange, Field, Round, Schema, State, Steps, Verdict, nothing
from holdfast.local.client import Local, Received
from holdfast.methods.base import ClientRule, Fields, Method, ServerRule
from holdfast.methods.context import Context
from holdfast.models.network import Network


class LocalClient(ClientRule):
    """Continue to train the own model."""

    only_fit = True

    def shared(self, network: Network, round: int) -> Tensor:
        return torch.zeros(network.layout.size, dtype=torch.bool)

    def init(self, local: Local) -> State:
        return {"own": local.initial}

    def schema(self, task: str, wire: Wire) -> Schema:
        return {"loss": Field("scalar")}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        fitted = local.fit(state["own"])
        return {"own": fitted.model}, {"loss": fitted.loss.to(fitted.model.dtype)}

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return state["own"]


class Silent(ServerRule):
    """A server that only starts the training."""

    def init(self, ctx: Context) -> State:
        return {}

    def round(self, state: State, ctx: Context) -> Round:
        method = self.method
        assert isinstance(method, LocalTraining)
        up = yield nothing("train", ctx.available if method.everyone else ctx.cohort, ctx.initial.dtype)
        return state, Verdict(up.ids)

    def deliver(self, state: State, ctx: Context, ids: Tensor) -> Steps[Exchange]:
        yield from ()
        return nothing("deliver", ids, ctx.initial.dtype)


@register("method", "local")
class LocalTraining(Method):
    """Every client trains alone and no model travels, only its training loss: the result without a
    federation."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "the training loss only",
        "what a client keeps": "its model",
        "personal model": "the model that it keeps",
        "what that says, beyond the update itself": "one number a round",
    }
    Client = LocalClient
    Server = Silent
    models = ("personal",)
    deploys = "personal"
    reduces = False
    everyone: bool = setting(
        False, "train all available clients in every round, not only the cohort (FedCAP's tables do)"
    )
