"""FedALA. Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for Personalized
Federated Learning, AAAI 2023.

FedAvg, except that a client does not simply overwrite its model theta_i by the received theta_g. The top p
parameter tensors begin at theta_i + (theta_g - theta_i) * W, with a weight in [0, 1] for every number,
learned on a share of the client's own data: W <- clip(W - eta * gradient * (theta_g - theta_i)). Lower
layers, and all buffers, are overwritten. The first time a client learns W, it goes on until the loss has
settled; later, W has only to follow, and one epoch does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.core.device import to_device
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.local.client import Local, Received
from holdfast.local.losses import Batch
from holdfast.local.per_client import plain
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Fields, Method
from holdfast.models.network import Network

Tensors = dict[str, Tensor]
OWN, APART = "own.", "apart."


def learn(
    gradient: Callable[[Tensors, Batch], Tensors], params: Tensors, batch: Batch, lr: Tensor
) -> Tensors:
    """One step of W. Where a tensor is mixed, `params` holds its weights W; the model is only put together to
    be differentiated."""
    own, apart = (
        {name.removeprefix(of): value for name, value in batch.aux.items() if name.startswith(of)}
        for of in (OWN, APART)
    )
    grads = gradient({**params, **{name: own[name] + apart[name] * params[name] for name in own}}, batch)
    return {**params, **{name: (params[name] - lr * grads[name] * apart[name]).clamp(0, 1) for name in own}}


class FedAlaClient(ClientRule):
    """Learn how much of the received model to take, then train."""

    method: FedAla

    def init(self, local: Local) -> State:
        """`own` is the last trained model, if there was a training; `weights` are W, and `learned` is whether
        they have settled once."""
        top, never = (
            self._top(local.network),
            torch.zeros(local.n, dtype=torch.bool, device=local.initial.device),
        )
        return {
            "own": local.initial,
            "weights": torch.ones_like(local.initial[:, top]),
            "trained": never,
            "learned": never,
        }

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        start, told = self._mixed(local, state, received)
        fitted = local.fit(start)
        told |= {"own": fitted.model, "trained": torch.ones_like(state["trained"])}
        return told, local.report(fitted.model, received, fitted)

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return state["own"]

    def _top(self, network: Network) -> slice:
        """Where the last p parameter tensors lie; also right for p = 0, and for a p beyond all there are."""
        starts = [slot.start for slot in network.layout.slots if not slot.buffer]
        end = network.layout.parameters
        return slice([*starts, end][max(0, len(starts) - self.method.layers)], end)

    def _mixed(self, local: Local, state: State, received: Received) -> tuple[Tensor, State]:
        """The model to begin with. A client that has not trained, or whose training diverged, has no model of
        its own to mix in; one whose own model equals the received one has nothing to choose."""
        top, start = self._top(local.network), received.into(state["own"])
        own, apart = state["own"][:, top], start[:, top] - state["own"][:, top]
        mixing = state["trained"] & (apart != 0).any(1) & torch.isfinite(own).all(1)
        if not bool(mixing.any()):
            return start, {"weights": state["weights"], "learned": state["learned"]}
        weights = self._learned(local, state, start, own, apart, mixing)
        mixed = start.clone()
        mixed[:, top] = torch.where(mixing[:, None], own + apart * weights, start[:, top])
        return mixed, {"weights": weights, "learned": state["learned"] | mixing}

    def _learned(
        self, local: Local, state: State, start: Tensor, own: Tensor, apart: Tensor, mixing: Tensor
    ) -> Tensor:
        """W after one epoch or, for those who learn it the first time, after as many as it takes for the loss
        to settle. Every client has its own number of epochs and its own batches, so other clients of the
        stack do not matter."""
        method, layout, top = self.method, local.network.layout, self._top(local.network)
        chosen = torch.zeros(layout.size, dtype=torch.bool)
        chosen[top] = True
        slots = [slot for slot in layout.slots if top.start <= slot.start < top.stop and not slot.buffer]
        aux = {
            f"{of}{s.name}": value[:, s.start - top.start : s.stop - top.start].reshape(-1, *s.shape)
            for of, value in ((OWN, own), (APART, apart))
            for s in slots
        }
        learner, at = self._learner(local), start.clone()
        at[:, top] = state["weights"]
        going, first, losses = mixing, mixing & ~state["learned"], []
        for epoch in range(method.most_epochs):
            fitted = learner.fit(
                at,
                purpose=f"weights {epoch}",
                epochs=going.long(),
                lr=local.settings.eta,
                drop_last=False,
                step=learn,
                trainable=chosen,
                aux=aux,
            )
            at = fitted.model
            losses.append(fitted.loss)
            going = going & first & ~self._settled(local, losses)
            if not bool(going.any()):
                break
        return at[:, top]

    def _learner(self, local: Local) -> Local:
        """The same clients on `share` per cent of their samples, drawn anew in every round; one at least."""
        count = local.data.count
        some = (
            (count * plain(local.settings.share).cpu().double() / 100)
            .floor()
            .long()
            .clamp(min=1)
            .minimum(count)
        )
        luck = to_device(local.key.fold("share").hash(local.data.rows.shape[1]), local.data.rows.device)
        return replace(local, data=local.data.drawn(luck, torch.zeros_like(some), some))

    def _settled(self, local: Local, losses: list[Tensor]) -> Tensor:
        """bool[n]: clients whose mean loss per epoch has hardly changed in the last epochs."""
        if len(losses) <= self.method.window:
            return torch.zeros_like(losses[0], dtype=torch.bool)
        return torch.stack(losses[-self.method.window :]).std(0, correction=0) < plain(
            local.settings.threshold
        )


@register(
    "method",
    "fedala",
    paper="Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023",
)
class FedAla(Method):
    """FedAvg whose clients learn, number by number, how much of the received top layers to take in place of
    their own.

    What travels is FedAvg's: one model down, one up; the weights W and the own model are private. Defaults
    are the authors' code's. A client that takes part for the first time, in whatever round, has nothing of
    its own and takes the received model as it is. With `layers = 0` this is fedavg-ft. Three differences from
    that code: whether anything is to be mixed depends on all top tensors, not by the sum of the first one;
    "settled" looks at the mean loss of an epoch, not at its last batch; learning ends after `most_epochs`."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "the model",
        "what a client keeps": "its model and the weights of an element-wise mixture",
        "personal model": "what it trained from the mixture",
        "what that says, beyond the update itself": "the mixture's weights stay",
    }
    Client = FedAlaClient
    Server = Averaging
    models = ("global", "personal")
    deploys = "personal"
    search: ClassVar[dict[str, tuple[float, ...]]] = {"eta": (0.1, 1.0, 10.0), "share": (20.0, 80.0, 100.0)}
    layers: int = setting(
        2,
        "p: how many parameter tensors are mixed, from the last one down (2: weight and bias of the last"
        " layer)",
        ge=0,
    )
    eta: float = setting(1.0, "learning rate of the weights W", ge=0)
    share: float = setting(80.0, "s: per cent of a client's samples on which it learns W", gt=0, le=100)
    threshold: float = setting(
        0.1,
        "the first learning of W ends when the standard deviation of the last epochs' losses is below this",
        ge=0,
    )
    window: int = setting(10, "number of these last epochs", ge=1)
    most_epochs: int = setting(100, "most epochs of the first learning of W", ge=1)
