"""FedProto. Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across
Heterogeneous Clients, AAAI 2022.

No model travels, only class prototypes: the mean of the features of a class's samples. The server averages
these over the clients that hold the class, and clients train with a pull of every sample's features to the
common prototype of its class. A sample is then taken for the class whose prototype is nearest. As long as no
client has sent any prototype, a client answers with its own head."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from holdfast.core.flat import Layout, Wire
from holdfast.core.recorded_table import RecordedTable
from holdfast.core.registry import register, setting
from holdfast.core.types import (
    Exchange,
    Field,
    Round,
    Schema,
    State,
    Steps,
    Verdict,
    broadcast,
    nothing,
)
from holdfast.evaluation.prototypes import apart, averaged, held, prototypes
from holdfast.local.client import Local, Received
from holdfast.local.losses import Batch, Loss
from holdfast.methods.base import MOST_SAMPLES, ClientRule, Fields, Method, ServerRule
from holdfast.methods.context import Context
from holdfast.models.features import catching
from holdfast.models.heads import ReplacedHead, replace_head
from holdfast.models.network import Network

FAR = 50.0
"""How far below all others the logit of a class without a prototype lies: never chosen, and its loss is still
a number."""


class Nearest(ReplacedHead):
    """A head with prototypes. In training it is the head; then it answers by the nearest prototype."""

    prototypes: Tensor
    known: Tensor
    sums: Tensor
    seen: Tensor
    steps: Tensor

    def __init__(self, head: nn.Module, classes: int, features: int, by_prototype: bool, adding: bool):
        super().__init__(head)
        self.by_prototype, self.adding = by_prototype, adding
        self.register_buffer("prototypes", torch.zeros(classes, features))
        self.register_buffer("known", torch.zeros(classes))
        if adding:  # buffers, like BatchNorm's: every plan keeps a row of them for each client
            self.register_buffer("sums", torch.zeros(classes, features))
            self.register_buffer("seen", torch.zeros(classes))
            self.register_buffer("steps", torch.zeros(()))

    def add(self, features: Tensor, batch: Batch) -> None:
        """One more step of training, whose features count if enough steps went before."""
        counts = batch.mask * (self.steps >= batch.aux["skipped"]).to(batch.mask.dtype)
        classes = torch.arange(len(self.seen), device=counts.device)
        which = (
            (batch.y[:, None] == classes) * counts[:, None]
        ).double()  # neither TF32 nor bfloat16 rounds a product in float64
        self.sums.add_((which.T @ features.detach().double()).to(self.sums.dtype))
        self.seen.add_(which.sum(0).to(self.seen.dtype))
        self.steps.add_(1)

    def forward(self, features: Tensor) -> Tensor:
        logits, known = self.inner(features), self.known > 0
        if self.training or not self.by_prototype:
            return logits
        # -|f - p|^2 without |f|^2, which is the same for all classes and so changes no softmax
        near = 2 * features.flatten(1) @ self.prototypes.T - self.prototypes.square().sum(1)
        least = torch.where(known, near, near.new_full((), float("inf"))).amin(1, keepdim=True)
        return torch.where(known.any(), torch.where(known, near, least - FAR), logits)


def pulled(net: nn.Module, batch: Batch, *, loss: Loss, head: str) -> Tensor:
    """The usual loss, plus lambda * the mean squared distance of the features to the prototype of the
    sample's class (Eq. 7); a class that has none pulls nothing."""
    with catching(net, head) as found:
        values = loss(net, batch)
    aim = net.get_submodule(head)
    assert isinstance(aim, Nearest)
    if aim.adding:
        aim.add(found[0], batch)
    return values + batch.aux["lam"] * apart(found[0], aim.prototypes, aim.known, batch.y)


class FedProtoClient(ClientRule):
    """Train the own model towards the common prototypes; send its own."""

    method: FedProto

    def network(self, module: nn.Module) -> nn.Module:
        by_prototype, adding = self.method.predict == "prototype", self.method.measure != "after"
        return replace_head(
            module, self.head_name, partial(Nearest, by_prototype=by_prototype, adding=adding)
        )

    def shared(self, network: Network, round: int) -> Tensor:
        return network.layout.mask(
            lambda slot: slot.name in (f"{network.head_name}.prototypes", f"{network.head_name}.known")
        )

    def init(self, local: Local) -> State:
        return {"own": local.initial}

    def schema(self, task: str, wire: Wire) -> Schema:
        shape = _shape(wire.model)
        counts = Field("count", shape[:1], low=0, high=MOST_SAMPLES, of_samples=True)
        return {"prototypes": Field("feature", shape), "held": counts, "loss": Field("scalar")}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        network, start = local.network, received.into(state["own"])
        loss = partial(pulled, loss=local.recipe.loss, head=network.head_name or "")
        aux = {"lam": local.settings.lam.to(start)}
        if self.method.measure != "after":
            aux["skipped"] = self._skipped(local).to(start)
        fitted = local.fit(start, loss=loss, aux=aux)
        model, means, counts = fitted.model, *self._measured(local, fitted.model)
        return {"own": model}, {
            "prototypes": means,
            "held": counts.to(model.dtype),
            "loss": fitted.loss.to(model.dtype),
        }

    def _measured(self, local: Local, model: Tensor) -> tuple[Tensor, Tensor]:
        """Class means of these clients' features, and how many samples of a class they have (Eq. 3). What was
        added up in training is taken out of the models."""
        network, classes = local.network, _shape(local.network.layout)[0]
        if self.method.measure == "after":
            own = prototypes(
                network, model, local.samples, local.data, local.plan, network.head_name, classes
            )
            return own.means, own.counts
        sums, seen, steps = (
            network.layout.slot(f"{network.head_name}.{name}") for name in ("sums", "seen", "steps")
        )
        often = model[:, seen.start : seen.stop].clone()
        means = model[:, sums.start : sums.stop].view(-1, *sums.shape) / often.clamp(min=1)[..., None]
        for slot in (sums, seen, steps):
            model[:, slot.start : slot.stop] = 0
        return means, held(local.data, classes) * (often > 0)

    def _skipped(self, local: Local) -> Tensor:
        """How many steps go before those whose features count: none, or all but the last that make an
        epoch."""
        recipe, count = local.recipe, local.count.cpu()
        if self.method.measure == "during":
            return torch.zeros_like(count)
        epoch = count // recipe.batch_size if recipe.drop_last else -(-count // recipe.batch_size)
        total = (
            torch.as_tensor(recipe.epochs).cpu() * epoch
            if recipe.steps is None
            else torch.as_tensor(recipe.steps).cpu()
        )
        return (total - epoch).clamp(min=0)

    def committee_model(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])


class FedProtoServer(ServerRule):
    """Average prototypes, class by class, over the clients that hold the class."""

    method: FedProto

    def round(self, state: State, ctx: Context) -> Round:
        shape = _shape(ctx.layout)
        old, known = _parts(state["model"], shape)
        up = yield self._sent("train", state, ctx, ctx.cohort)
        mean, known = averaged(up["prototypes"], up["held"], self.method.weighting, old, known)  # Eq. 6
        model = torch.cat([mean.flatten(), known])
        verdict = Verdict(
            up.ids, tables={"held": up["held"].double(), "holders": (up["held"] > 0).sum(0).double()}
        )
        return {**state, "model": model}, verdict

    def deliver(self, state: State, ctx: Context, ids: Tensor) -> Steps[Exchange]:
        yield from ()
        return self._sent("deliver", state, ctx, ids)

    def _sent(self, task: str, state: State, ctx: Context, ids: Tensor) -> Exchange:
        """The prototypes; before there are any, nothing."""
        known = _parts(state["model"], _shape(ctx.layout))[1]
        return (
            broadcast(task, state["model"], ids)
            if bool(known.any())
            else nothing(task, ids, ctx.initial.dtype)
        )

    def global_model(self, state: State) -> None:
        return None


def _shape(layout: Layout) -> tuple[int, ...]:
    """Classes and features."""
    return layout.slot(f"{layout.head}.prototypes").shape


def _parts(model: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """What travels, apart: prototypes [classes, d] and which of them are known [classes]."""
    prototypes, known = model.split([shape[0] * shape[1], shape[0]])
    return prototypes.view(shape), known


@register(
    "method",
    "fedproto",
    paper="Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022",
)
class FedProto(Method):
    """Only class prototypes travel: mean features, averaged over the clients that hold the class, to which
    all features are pulled.

    A sample is taken for the class with the nearest common prototype (`predict = "head"`: for the answer of
    the client's own head). Before any prototype exists, the head decides; a class without a prototype is
    never chosen. A client outside the cohort uses the prototypes it was sent last. The pull is a mean over
    features, as in the common code, so `lam` does not depend on their number.

    A client's prototypes are means of the features that its trained model makes of its samples (Eq. 3).
    `measure = "during"` takes those that every batch of the local training had in its own step instead, under
    the model before that step, in training mode and augmented as it was, over all epochs (PFLlib);
    `last-epoch` those of the last as many steps as an epoch has (the authors' code)."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "class means of features",
        "what a client keeps": "the whole model",
        "personal model": "by the nearest prototype, or by the head",
        "what that says, beyond the update itself": (
            "no model at all, but a mean feature for every class, and the class counts"
        ),
    }
    Client = FedProtoClient
    Server = FedProtoServer
    models = ("personal",)
    deploys = "personal"
    reduces = False
    tables = {
        "held": RecordedTable("how many samples of each class each client holds", kind="pairs"),
        "holders": RecordedTable("how many clients hold each class", kind="number"),
    }
    search: ClassVar[dict[str, tuple[float, ...]]] = {"lam": (0.1, 1.0, 5.0, 10.0)}
    lam: float = setting(
        1.0,
        "strength of the pull of features to the common prototype of their class (0: local training)",
        ge=0,
    )
    measure: Literal["after", "during", "last-epoch"] = setting(
        "after",
        "prototypes of all samples by the trained model, or of the training batches, each in its own step,"
        " all or the last epoch's",
    )
    predict: Literal["prototype", "head"] = setting(
        "prototype", "what predicts: the nearest common prototype, or the client's own head"
    )
    weighting: Literal["equal", "samples"] = setting(
        "equal", "clients that hold a class count alike (code), or by samples of it (Eq. 6)"
    )
