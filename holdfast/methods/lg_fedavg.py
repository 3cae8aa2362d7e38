"""LG-FedAvg. Liang, Liu, Ziyin, Salakhutdinov, Morency: Think Locally, Act Globally: Federated Learning with
Local and Global Representations, NeurIPS 2019 workshop on federated learning (arXiv 2001.01523).

Client k keeps its representation l_k (the lower layers) for itself; the global model g on top, the head, is
averaged. Both are trained at once, from the g that was sent and the own l_k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from holdfast.core.registry import register
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import Method
from holdfast.methods.partial_sharing import PartialSharingClient
from holdfast.models.network import Network

PAPER = (
    "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations,"
    " arXiv 2001.01523, 2019"
)


class LgFedAvgClient(PartialSharingClient):
    """g from the server, l_k from the client itself."""

    only_fit = True

    def shared(self, network: Network, round: int) -> Tensor:
        return network.head


@register("method", "lg-fedavg", paper=PAPER)
class LgFedAvg(Method):
    """The head is averaged, every client keeps a backbone of its own: little travels.

    The paper starts from a model that FedAvg has trained before: train it, save it, and name the file by
    `model.weights`. From a random start, as in PFLlib, a client that has never trained has a random
    backbone."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "head",
        "what a client keeps": "backbone",
        "personal model": "own backbone under the newest head",
        "what that says, beyond the update itself": "the head only: the part that says most about classes",
    }
    Client = LgFedAvgClient
    Server = Averaging
    models = ("personal",)
    deploys = "personal"
