"""FedBABU. Oh, Kim, Yun: FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR
2022.

Algorithm 1: the head stays as it was drawn, the same for all, and only the body is trained and averaged.
After the last round every client tunes the common model on its own data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast.core.flat import Wire
from holdfast.core.registry import register, setting
from holdfast.core.types import Field, Schema, State, Steps
from holdfast.local.client import Local, Received
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Fields, Method
from holdfast.methods.context import Context
from holdfast.methods.finetuning import (
    TunedPart,
    ask_to_fine_tune,
    fine_tune,
    fit_part,
    tuned_or_newest_model,
)
from holdfast.models.network import Network

PAPER = "Oh et al., FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022"


class FedBabuClient(ClientRule):
    """Train the body under the common head; in the end, tune."""

    only_fit = True
    tasks = frozenset({"train", "tune"})
    method: FedBabu

    def trainings(self) -> Mapping[str, int]:
        return {"train/fit": 1, "tune/fit": 0}  # the tuning starts afresh

    def shared(self, network: Network, round: int) -> Tensor:
        return ~network.head

    def init(self, local: Local) -> State:
        """`own` is the model it would use by itself: the last one it was sent, or the one it has tuned."""
        return {
            "own": local.initial,
            "tuned": torch.zeros(local.n, dtype=torch.bool, device=local.initial.device),
        }

    def schema(self, task: str, wire: Wire) -> Schema:
        return {"loss": Field("scalar")} if task == "tune" else super().schema(task, wire)

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        start = received.into(local.initial)  # the common head, whatever happened before
        fitted = fit_part(local, start, ~local.network.head)
        return {"own": start, "tuned": torch.zeros_like(state["tuned"])}, local.report(
            fitted.model, received, fitted
        )

    def tune(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        fitted = fine_tune(local, received.into(local.initial), self.method.tune, self.method.tune_epochs)
        return {"own": fitted.model, "tuned": torch.ones_like(state["tuned"])}, {
            "loss": fitted.loss.to(fitted.model.dtype)
        }

    def finetune(self, local: Local, state: State, received: Received) -> State:
        """Training is for the common body alone; personalisation is the tuning."""
        return self.tune(local, state, received, {})[0]

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return tuned_or_newest_model(local, state, received)


class FedBabuServer(Averaging):
    """Average the bodies; in the end, ask all clients to tune."""

    method: FedBabu

    def finish(self, state: State, ctx: Context) -> Steps[State]:
        return (yield from ask_to_fine_tune(state, ctx, self.method.tune_epochs))


@register("method", "fedbabu", paper=PAPER)
class FedBabu(Method):
    """Only the backbone is trained and travels, under a head that stays as it was drawn; after the last round
    every client tunes.

    Until then all have one model, so the figures before the last are those of the common model; the last line
    is after tuning, which counts as one more round (its one backbone per client is in the bytes). A client
    that is away at the end stays untuned."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "backbone under a head that is not trained",
        "what a client keeps": "after the last round: all of it, tuned",
        "personal model": "the tuned model",
        "what that says, beyond the update itself": "backbone only; the tuning after the last round stays",
    }
    Client = FedBabuClient
    Server = FedBabuServer
    models = ("global", "personal")
    deploys = "personal"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"tune_epochs": (1, 5, 10)}
    tune: TunedPart = setting(
        "all", "what a client tunes after the last round: the whole model (PFLlib) or only the head"
    )
    tune_epochs: int = setting(
        10, "epochs of that tuning (PFLlib: 10; 0: every client uses the common model)", ge=0
    )
