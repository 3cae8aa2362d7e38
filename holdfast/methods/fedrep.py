"""FedRep. Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized
Federated Learning, ICML 2021.

Algorithm 1: client k first fits its head h_k to the representation phi that it was sent, by many steps; then
it moves phi, under the head it has now; only phi is averaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.local.client import Local, Received
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Fields, Method
from holdfast.methods.finetuning import fit_part
from holdfast.models.network import Network

PAPER = "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021"


class FedRepClient(ClientRule):
    """The head on the received body, then the body under that head."""

    only_fit = True
    method: FedRep

    def trainings(self) -> Mapping[str, int]:
        return {"train/head": 1, "train/fit": 1}

    def shared(self, network: Network, round: int) -> Tensor:
        return ~network.head

    def init(self, local: Local) -> State:
        return {"own": local.initial}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        head, start = local.network.head, received.into(state["own"])
        headed = fit_part(
            local, start, head, purpose="head", epochs=self.method.head_epochs
        ).model  # h_k, phi frozen
        fitted = fit_part(local, headed, ~head)  # phi, h_k frozen
        return {"own": fitted.model}, local.report(fitted.model, received, fitted)

    def committee_model(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])


@register("method", "fedrep", paper=PAPER)
class FedRep(Method):
    """As fedper, but one after the other: the head under the received backbone, then the backbone under that
    head.

    Only the backbone travels. `train.local_epochs` (or `local_steps`) are the backbone's; the paper has 10
    epochs for the head and 1 for the backbone, PFLlib 1 for the head. While one part is trained, the other
    stays to the last number, running statistics included."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "backbone",
        "what a client keeps": "head, trained first under a frozen backbone",
        "personal model": "newest backbone under the own head",
        "what that says, beyond the update itself": "backbone only",
    }
    Client = FedRepClient
    Server = Averaging
    models = ("personal",)
    deploys = "personal"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"head_epochs": (1, 5, 10)}
    head_epochs: int = setting(
        10,
        "epochs for the head before the backbone is trained (paper: 10, PFLlib: 1; 0: heads never move)",
        ge=0,
    )
