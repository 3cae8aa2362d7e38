"""FedRoD. Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR
2022.

One body, two heads. Body and generic head are trained as if all classes were equally frequent (balanced
softmax: log n_c is added to the logits) and averaged: together they are the global model. The personal head
never leaves its client and learns, on features that it does not change, what to add to the generic logits:
the plain loss of their sum. That sum is the personal prediction."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.errors import ConfigError
from holdfast.core.registry import register
from holdfast.core.types import State
from holdfast.local.client import Local, Received
from holdfast.local.losses import Batch, Loss
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Fields, Method
from holdfast.models.network import Network
from holdfast.models.pair import loss_with
from holdfast.models.proxy_module import ProxyModule

NO_SAMPLES = 1e-30
"""In place of a count of 0: the class has practically no share in the softmax, but no loss becomes
infinite."""


class TwoHeads(ProxyModule):
    """In the place of the model's head. `voice` is 1 where a client has trained the personal head; the common
    start, and with it every global model, has 0: there only the generic one counts."""

    proxied = "generic"
    voice: Tensor

    def __init__(self, head: nn.Module):
        super().__init__()
        self.generic, self.personal = head, copy.deepcopy(head)
        self.register_buffer("voice", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        return self.generic(features) + self.voice * self.personal(features.detach())


def both_losses(net: nn.Module, batch: Batch, *, loss: Loss, head: str) -> Tensor:
    """The experiment's loss twice: of the generic logits with the classes' counts, and of the sum, which
    reaches the personal head alone, whatever else the loss looks at."""
    generic, personal = _logits(net, batch.x, head)
    counts = batch.aux["log_counts"]
    counts = F.pad(
        counts, (0, generic.shape[-1] - counts.shape[-1]), value=math.log(NO_SAMPLES)
    )  # outputs that no label ever has
    still = {
        f"net.{name}": value.detach()
        for name, value in net.named_parameters()
        if not name.startswith(f"{head}.personal.")
    }
    balanced, summed = (
        loss(Answered(net, generic + counts), batch),
        Answered(net, generic.detach() + personal),
    )
    return balanced + loss_with(summed, still, loss, batch)


class Answered(ProxyModule):
    """The network as a loss sees it, with an answer that is there already."""

    proxied = "net"

    def __init__(self, net: nn.Module, answer: Tensor):
        super().__init__()
        self.net, self.answer = net, answer

    def forward(self, x: Tensor) -> Tensor:
        return self.answer


def _logits(net: nn.Module, x: Tensor, head: str) -> tuple[Tensor, Tensor]:
    """The logits of both heads, from one pass."""
    heads = net.get_submodule(head)
    logits: dict[str, Tensor] = {}
    handles = [
        getattr(heads, name).register_forward_hook(
            lambda module, inputs, answer, name=name: logits.__setitem__(name, answer)
        )
        for name in ("generic", "personal")
    ]
    try:
        net(x)
    finally:
        for handle in handles:
            handle.remove()
    if not logits:
        raise ConfigError(
            f"model: the forward pass never calls the head '{head}' as a module, as in self.{head}(features)"
        )
    return logits["generic"], logits["personal"]


class FedRodClient(ClientRule):
    """Train the body under both heads, send all but the personal one."""

    def network(self, module: nn.Module) -> nn.Module:
        if not self.head_name:
            raise ConfigError(
                "model: fedrod needs a head; name the submodule, as in holdfast.Model(module, head='fc')"
            )
        parent, _, name = self.head_name.rpartition(".")
        setattr(module.get_submodule(parent), name, TwoHeads(module.get_submodule(self.head_name)))
        return module

    def shared(self, network: Network, round: int) -> Tensor:
        return ~(network.layout.under(f"{network.head_name}.personal") | _voice(network))

    def init(self, local: Local) -> State:
        return {"own": local.initial}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        start = torch.where(_voice(local.network).to(local.initial.device), 1.0, received.into(state["own"]))
        loss = partial(both_losses, loss=local.recipe.loss, head=local.network.head_name or "")
        fitted = local.fit(start, loss=loss, aux={"log_counts": log_counts(local)})
        return {"own": fitted.model}, local.report(fitted.model, received, fitted)

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])


def _voice(network: Network) -> Tensor:
    return network.layout.under(f"{network.head_name}.voice")


def log_counts(local: Local) -> Tensor:
    """[n, classes]: log n_c of the labels that a client trains on, flipped ones as they are."""
    data, classes = local.data, local.samples.classes
    count = local.initial.new_zeros(local.n, classes).scatter_add_(
        1, data.labels, data.mask.to(local.initial.dtype)
    )
    return count.clamp(min=NO_SAMPLES).log()


@register(
    "method",
    "fedrod",
    paper="Chen, Chao, On Bridging Generic and Personalized FL for Image Classification, ICLR 2022",
)
class FedRod(Method):
    """One body with two heads: a generic one that treats all classes equally and is averaged, and a private
    one for the client's own classes.

    Body and generic head travel, one model down and one up; the personal head starts as a copy of the generic
    one, is built around any model whose head is named, and never leaves. `global` is the generic prediction,
    `personal` the sum of both heads (FedCAP's tables take the better of the two); a client that never trained
    predicts by the generic head. A class that a client does not have is left out of its balanced softmax.
    This is the paper's linear version, without the hypernetwork."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "body and generic head",
        "what a client keeps": "personal head",
        "personal model": "sum of both heads",
        "what that says, beyond the update itself": "body and generic head; the personal head stays",
    }
    Client = FedRodClient
    Server = Averaging
    models = ("global", "personal")
    deploys = "personal"
