"""FedBN. Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization, ICLR 2021.

Algorithm 1: FedAvg on all layers but the BatchNorm ones, whose scale, shift and running statistics stay with
the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.core.registry import register
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import Method
from holdfast.methods.partial_sharing import PartialSharingClient
from holdfast.models.network import Network

PAPER = "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021"


class FedBnClient(PartialSharingClient):
    """Everything from the server, the normalisation from the client itself."""

    def shared(self, network: Network, round: int) -> Tensor:
        mine = network.normalisation
        if not bool(mine.any()):
            raise ConfigError(
                "method fedbn: the model has no BatchNorm layer to keep; choose one that has (mlp:"
                " model.batch_norm = true)"
            )
        return ~mine


@register("method", "fedbn", paper=PAPER)
class FedBn(Method):
    """FedAvg, but every client keeps its BatchNorm layers, scale, shift and running statistics, for itself.

    For clients whose inputs look different (other sensors, other scanners). GroupNorm and LayerNorm do not
    depend on other samples, and travel. A client that has never trained has the start's statistics, which fit
    no client: score such clients by `evaluate.unselected = "finetune"`."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "all but BatchNorm",
        "what a client keeps": "BatchNorm's parameters and statistics",
        "personal model": "the received model with the own BatchNorm",
        "what that says, beyond the update itself": "BatchNorm stays, with the statistics of the features",
    }
    Client = FedBnClient
    Server = Averaging
    models = ("personal",)
    deploys = "personal"
