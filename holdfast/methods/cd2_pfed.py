"""CD2-pFed. Shen, Zhou, Yu: CD2-pFed: Cyclic Distillation-guided Channel Decoupling for Model Personalization
in FL, CVPR 2022.

FROM GENERAL KNOWLEDGE: neither the paper's text nor code was at hand, so agreement with the paper's details
is not claimed. Every layer is cut by its output channels: a share rho is private, the rest is averaged. So
that both halves learn from each other, the predictions that each gives without the other are drawn together
("cyclic distillation"):
    cross-entropy + lambda (KL(p_private | p_shared) + KL(p_shared | p_private))."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from holdfast.core.columns import Reads
from holdfast.core.registry import register, setting
from holdfast.core.types import Exchange, Round, State, Steps
from holdfast.local.client import Local, Received
from holdfast.local.losses import Batch, Loss
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Fields, Method, ServerRule
from holdfast.methods.context import Context
from holdfast.models.channels import axis_of, channels
from holdfast.models.network import Network

OWN = "private."


def cyclic(net: nn.Module, batch: Batch, *, loss: Loss) -> Tensor:
    """The experiment's loss of the whole network, and how far its two halves disagree about each sample."""
    values = loss(net, batch)
    private = {name.removeprefix(OWN): value for name, value in batch.aux.items() if name.startswith(OWN)}
    one, other = (
        _said(net, batch.x, half).log_softmax(1)
        for half in (private, {name: 1 - value for name, value in private.items()})
    )
    return values + batch.aux["lam"] * ((one.exp() - other.exp()) * (one - other)).sum(
        1
    )  # KL in both directions


def _said(net: nn.Module, x: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
    """The answer with some channels alone. Running statistics, which are of the whole network, do not change
    by it; Dropout's key is a copy, too, and so drops what it dropped for the whole."""
    whole = dict(net.named_parameters())
    tensors = {name: whole[name] * mask for name, mask in kept.items()}
    return functional_call(net, tensors | {name: value.clone() for name, value in net.named_buffers()}, (x,))


class Cd2PfedClient(ClientRule):
    """The shared channels from the server, the private ones from oneself."""

    only_fit = True
    method: Cd2Pfed
    models_per_client = 3

    def shared(self, network: Network, round: int) -> Tensor:
        return channels(network, 1 - self.method.share(round))

    def init(self, local: Local) -> State:
        return {"own": local.initial}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        start, halves = received.into(state["own"]), self._halves(local)
        if halves:
            aux = {name: half.to(start).expand(local.n, *half.shape) for name, half in halves.items()}
            fitted = local.fit(
                start, loss=partial(cyclic, loss=local.recipe.loss), aux={**aux, "lam": local.settings.lam}
            )
        else:  # all shared, or all private: there is no other half
            fitted = local.fit(start)
        return {"own": fitted.model}, local.report(fitted.model, received, fitted)

    def committee_model(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])

    def _halves(self, local: Local) -> dict[str, Tensor]:
        """For every tensor below the head, which of its output channels are private, in a shape that it can
        be multiplied with. The head itself, whose channels are the classes, stays whole: each half answers
        for all classes, from the features it has."""
        network = local.network
        private = ~self.shared(network, local.round)
        below = network.layout.mask(lambda slot: not slot.buffer and bool(slot.shape))
        if network.head_name:
            below &= ~network.head
        if not bool(private[below].any()) or bool(private[below].all()):
            return {}
        slots = [slot for slot in network.layout.slots if bool(below[slot.start : slot.stop].any())]
        return {
            f"{OWN}{s.name}": _by_channel(private[s.start : s.stop].view(s.shape), axis_of(network, s.name))
            for s in slots
        }


def _by_channel(private: Tensor, axis: int) -> Tensor:
    """One number for each channel, all others of a channel being like it."""
    for other in range(private.ndim):
        private = private if other == axis else private.narrow(other, 0, 1)
    return private


class Narrowing(ServerRule):
    """FedAvg's server, whose model loses what becomes private as the private share grows."""

    reads: ClassVar[Reads] = "columns"

    def init(self, ctx: Context) -> State:
        return {"model": ctx.initial, "index": ctx.wire.index}

    def round(self, state: State, ctx: Context) -> Round:
        return (yield from Averaging(self.method).round(_narrowed(state, ctx), ctx))

    def deliver(self, state: State, ctx: Context, ids: Tensor) -> Steps[Exchange]:
        return (yield from Averaging(self.method).deliver(_narrowed(state, ctx), ctx, ids))


def _narrowed(state: State, ctx: Context) -> State:
    """Keep only what still travels, also in what a rule remembers for each parameter."""
    kept = torch.isin(state["index"], ctx.wire.index)
    if bool(kept.all()):
        return state
    parameters = int((state["index"] < ctx.layout.parameters).sum())
    memory = {
        k: v[..., kept[:parameters]]
        for k, v in state.items()
        if "/" in k and v.ndim and v.shape[-1] == parameters
    }
    return {**state, **memory, "model": state["model"][kept], "index": ctx.wire.index}


@register(
    "method",
    "cd2-pfed",
    paper="Shen et al., CD2-pFed: Cyclic Distillation-guided Channel Decoupling, CVPR 2022",
)
class Cd2Pfed(Method):
    """A share of every layer's output channels is private, the rest is averaged, and the two halves teach
    each other.

    Written from general knowledge of the paper, not from its text or code: its numbers are not the paper's.
    Only shared channels travel, down and up. A client is scored with the newest shared channels beside its
    own private ones; one that never trained has the common start's. With `rho = 0` this is fedavg. FedAS's
    `decoupling = "channels"` makes the same cut."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "a share of every layer's channels",
        "what a client keeps": "the other channels",
        "personal model": "all channels together",
        "what that says, beyond the update itself": "the shared channels only",
    }
    Client = Cd2PfedClient
    Server = Narrowing
    models = ("personal",)
    deploys = "personal"
    search: ClassVar[dict[str, tuple[float, ...]]] = {"rho": (0.25, 0.5, 0.75), "lam": (0.1, 1.0)}
    rho: float = setting(0.5, "private share of the output channels of every layer", static=True, ge=0, le=1)
    grow: int = setting(
        0,
        "rounds in which the private share grows linearly from 0 to rho (0: it is rho from the start)",
        ge=0,
    )
    lam: float = setting(1.0, "how strongly the halves are drawn together (0: channels are only cut)", ge=0)

    def share(self, round: int) -> float:
        return self.rho * min(1.0, round / self.grow) if self.grow else self.rho
