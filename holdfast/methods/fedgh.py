"""FedGH. Yi, Wang, Liu, Shi, Yu: FedGH: Heterogeneous Federated Learning with Generalized Global Header, ACM
MM 2023.

Clients train a model each and send the mean features of each class. The server trains one head on these
(mean, label) pairs and sends it to all clients. Bodies never travel, and may even differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.core.flat import Wire
from holdfast.core.keys import Key
from holdfast.core.recorded_table import RecordedTable
from holdfast.core.registry import register, setting
from holdfast.core.types import Field, Round, Schema, State, Verdict
from holdfast.evaluation.prototypes import prototypes
from holdfast.local.client import Local, Received
from holdfast.methods.base import MOST_SAMPLES, ClientRule, Fields, Method, ServerRule
from holdfast.methods.context import Context
from holdfast.models.features import head_sizes, linear_head
from holdfast.models.network import Network


class FedGHClient(ClientRule):
    """Train everything from the received head on; send the class means of its features."""

    def shared(self, network: Network, round: int) -> Tensor:
        return network.head

    def init(self, local: Local) -> State:
        return {"own": local.initial}

    def schema(self, task: str, wire: Wire) -> Schema:
        classes, width = head_sizes(wire.model)
        held = Field("count", (classes,), low=0, high=MOST_SAMPLES, of_samples=True)
        return {"prototypes": Field("feature", (classes, width)), "held": held, "loss": Field("scalar")}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        network = local.network
        fitted = local.fit(received.into(state["own"]))
        classes = head_sizes(network.layout)[0]
        own = prototypes(
            network, fitted.model, local.samples, local.data, local.plan, network.head_name, classes
        )
        kind = fitted.model.dtype
        return {"own": fitted.model}, {
            "prototypes": own.means,
            "held": own.counts.to(kind),
            "loss": fitted.loss.to(kind),
        }

    def committee_model(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])


class FedGHServer(ServerRule):
    """Train the head on what the clients' classes look like."""

    method: FedGH

    def init(self, ctx: Context) -> State:
        linear_head(ctx.layout)  # refused before any client trains
        return super().init(ctx)

    def round(self, state: State, ctx: Context) -> Round:
        up = yield ctx.ask("train", state["model"])
        client, label = (up["held"] > 0).nonzero(
            as_tuple=True
        )  # a class that a client does not hold is no pair
        with ctx.timer.part("head"):
            model = self._trained(state["model"], ctx, up["prototypes"][client, label], label)
        verdict = Verdict(up.ids, tables={"held": up["held"].double()})
        if not bool(torch.isfinite(model).all()):
            note = "training the head diverged, so it stays as it was; try a lower method.head_lr"
            return state, replace(verdict, notes=(note,))
        return {**state, "model": model}, verdict

    def _trained(self, model: Tensor, ctx: Context, x: Tensor, y: Tensor) -> Tensor:
        """Some passes of plain SGD on the cross-entropy of a linear layer, whose gradient is (softmax - y)
        x."""
        method, (weight, bias), out = self.method, linear_head(ctx.wire.layout(ctx.layout)), model.clone()
        w, x, y = out[weight.start : weight.stop].view(weight.shape), x.to(out.device), y.to(out.device)
        b = None if bias is None else out[bias.start : bias.stop]
        for epoch in range(method.head_epochs):
            for batch in _order(ctx.key.fold("head", epoch), len(y)).split(method.head_batch_size):
                logits = F.linear(x[batch], w, b)
                error = (logits.softmax(1) - F.one_hot(y[batch], len(w)).to(w)) / len(batch)
                w -= method.head_lr * error.T @ x[batch]
                if b is not None:
                    b -= method.head_lr * error.sum(0)
        return out


def _order(key: Key, pairs: int) -> Tensor:
    return key.fold(torch.arange(pairs)).uniform(dtype=torch.float64).argsort(stable=True)


@register(
    "method",
    "fedgh",
    paper="Yi et al., FedGH: Heterogeneous Federated Learning with Generalized Global Header, ACM MM 2023",
)
class FedGH(Method):
    """Private bodies under one common head, which the server trains on the class means of the clients'
    features.

    Up go class means, down comes the head, which must be one linear layer. A client answers with its own body
    under the head it was sent last; one that was not in the cohort keeps the head it trained."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "up class means, down a head that the server trained on them",
        "what a client keeps": "the body",
        "personal model": "own body under that head",
        "what that says, beyond the update itself": (
            "`prototypes`: a mean feature for every class, of one sample where a class has one; "
            "and the class counts"
        ),
    }
    Client = FedGHClient
    Server = FedGHServer
    tables = {"held": RecordedTable("how many samples of each class each client holds", kind="pairs")}
    models = ("personal",)
    deploys = "personal"
    reduces = False
    search: ClassVar[dict[str, tuple[float, ...]]] = {"head_lr": (0.01, 0.1, 1.0)}
    head_lr: float = setting(1.0, "the server's learning rate for the head", ge=0)
    head_epochs: int = setting(1, "passes of the server over the class means", ge=0)
    head_batch_size: int = setting(10, "class means in a step of the server", ge=1)
