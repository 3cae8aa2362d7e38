"""The client half of methods that share a part of the model and train all of it at once: the method decides
which part."""

from __future__ import annotations

from torch import Tensor

from holdfast.core.types import State
from holdfast.local.client import Local, Received
from holdfast.methods.base import ClientRule, Fields


class PartialSharingClient(ClientRule):
    """What travels comes from the server, the rest stays with the client. `own` is the whole model as the
    last training left it: a client that is sent nothing uses exactly that, also when the server's part has
    moved on since."""

    def init(self, local: Local) -> State:
        return {"own": local.initial}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        fitted = local.fit(received.into(state["own"]))
        return {"own": fitted.model}, local.report(fitted.model, received, fitted)

    def committee_model(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])
