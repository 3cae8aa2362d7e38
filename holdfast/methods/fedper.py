"""FedPer. Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers, arXiv
1912.00818, 2019.

Algorithms 1 and 2: base layers W_B are averaged over clients, personalisation layers W_P,k never leave client
k; a client trains both at once by SGD, from the W_B it was sent and its own W_P,k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from holdfast.core.registry import register
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import Method
from holdfast.methods.partial_sharing import PartialSharingClient
from holdfast.models.network import Network

PAPER = "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818, 2019"


class FedPerClient(PartialSharingClient):
    """W_B from the server, W_P,k from the client itself."""

    only_fit = True

    def shared(self, network: Network, round: int) -> Tensor:
        return ~network.head


@register("method", "fedper", paper=PAPER)
class FedPer(Method):
    """The backbone is averaged, every client keeps a head of its own, and both are trained at once.

    Only the backbone travels (with its running statistics). A client is scored with the newest backbone under
    its own head; one that did not take part keeps the backbone it had (`evaluate.unselected = "keep_own"`):
    its head has never seen the newest. A client that has never trained has the newest backbone and the common
    start's head."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "backbone",
        "what a client keeps": "head",
        "personal model": "newest backbone under the own head",
        "what that says, beyond the update itself": "backbone only",
    }
    Client = FedPerClient
    Server = Averaging
    models = ("personal",)
    deploys = "personal"
