"""APFL. Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning, arXiv 2003.13461, 2020.

Beside the w of the federation, client i keeps v_i; what it uses is the mixture v-bar_i = alpha_i v_i + (1 -
alpha_i) w_i. In each local step, w_i follows its own gradient and v_i that of the loss of the mixture
(Algorithm 1):

    w_i <- w_i - eta grad f(w_i)        v_i <- v_i - eta alpha_i grad f(v-bar_i), where w_i is constant

alpha_i is fixed, or moves at the start of each round by one step along <v_i - w_i, grad f(v-bar_i)>, within
[0, 1]."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.local.client import Local, Received
from holdfast.local.losses import Batch, Loss
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Fields, Method
from holdfast.methods.finetuning import fit_part
from holdfast.models.network import Network
from holdfast.models.pair import SHARED, Pair, filled, halves, loss_with, taken

PAPER = "Deng et al., Adaptive Personalized Federated Learning, arXiv 2003.13461, 2020"
ALPHA = "alpha"


class Mixing(Pair):
    """w, v and the share of v: a parameter, so that its gradient comes by itself."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.alpha = nn.Parameter(torch.zeros(()))


def both(net: Mixing, batch: Batch, *, loss: Loss) -> Tensor:
    """The loss of w, whose value is reported, with the gradients of both: that of the mixture reaches v and
    alpha only."""
    w, alpha = dict(net.shared.named_parameters()), net.alpha
    mixture = {name: alpha * v + (1 - alpha) * w[name].detach() for name, v in net.own.named_parameters()}
    mixed = loss_with(net.own, mixture, loss, batch)
    return loss(net.shared, batch) + (mixed - mixed.detach()).nan_to_num()  # a diverged v must not affect w


class ApflClient(ClientRule):
    """Train w for the federation and v for the mixture, on the same batches."""

    models_per_client = 2
    refuses = {"train.clip_gradient": "both of its models are one network, with one norm for two gradients"}
    method: Apfl

    def network(self, module: nn.Module) -> nn.Module:
        return Mixing(module)

    def head(self, name: str) -> str:
        return f"{SHARED}.{name}"

    def unwrapped(self, network: nn.Module) -> nn.Module:
        return network.get_submodule(SHARED)

    def shared(self, network: Network, round: int) -> Tensor:
        return network.layout.under(SHARED)

    def init(self, local: Local) -> State:
        """`own` holds w, v and alpha; a client that has not been `seen` has no v yet."""
        mine = filled(
            local.initial, _alpha(local.network), local.settings.alpha[:, None].to(local.initial.dtype)
        )
        return {"own": mine, "seen": torch.zeros(local.n, dtype=torch.bool, device=mine.device)}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        w, v = halves(local.network)
        start, loss = received.into(state["own"]), partial(both, loss=local.recipe.loss)
        start = torch.where(
            state["seen"][:, None], start, filled(start, v, taken(start, w))
        )  # v_i begins as the first w it was sent
        alpha = local.network.layout.under(ALPHA)
        if self.method.adaptive:
            moved = fit_part(
                local, start, alpha, purpose=ALPHA, loss=loss, steps=1, **local.plain_sgd
            ).model  # one plain gradient step, whatever optimiser w and v have
            start = torch.where(alpha.to(moved.device), moved.clamp(0, 1), moved)
        fitted = local.fit(start, trainable=~alpha, loss=loss)
        return {"own": fitted.model, "seen": torch.ones_like(state["seen"])}, local.report(
            fitted.model, received, fitted
        )

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        """The mixture with the newest w, in the place of w, whose tensors predict; running statistics are
        mixed alike."""
        (w, v), whole = halves(local.network), received.into(state["own"])
        alpha = taken(whole, _alpha(local.network))
        return filled(whole, w, alpha * taken(whole, v) + (1 - alpha) * taken(whole, w))


def _alpha(network: Network) -> Tensor:
    return network.layout.under(ALPHA).nonzero().flatten()


@register("method", "apfl", paper=PAPER)
class Apfl(Method):
    """Every client uses a mixture of the common model and one of its own, by a share alpha that it may learn
    for itself.

    The common model is FedAvg's, whatever the mixtures do; it alone travels, and alpha stays with the client.
    alpha = 0 without `adaptive` is FedAvg. A client's own model begins as the first common model it is sent,
    also in round 30. The authors' code mixes predictions instead of parameters and adds 0.02 alpha to alpha's
    gradient; PFLlib moves alpha in every step."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "the model",
        "what a client keeps": "a second model and its share alpha in the mixture",
        "personal model": "the mixture",
        "what that says, beyond the update itself": (
            "the second model stays, the update of the shared one is that of all the data"
        ),
    }
    Client = ApflClient
    Server = Averaging
    models = ("global", "personal")
    deploys = "personal"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"alpha": (0.25, 0.5, 0.75)}
    alpha: float = setting(
        0.5,
        "share of the own model in the mixture (paper: 0.25, 0.5, 0.75), or where it starts from",
        ge=0,
        le=1,
    )
    adaptive: bool = setting(True, "whether each client moves its alpha by one gradient step a round")
