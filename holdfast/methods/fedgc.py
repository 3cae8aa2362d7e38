"""FedGC. Niu, Deng: Federated Learning for Face Recognition with Gradient Correction, AAAI 2022.

Made for clients whose classes are persons that no other client has: a client's head has only the classes it
holds, so nothing keeps its class embeddings (the head's rows) apart from those of other clients. The server
does: it averages the bodies, keeps every client's head, and takes one gradient step on a softmax that wants
each embedding near its class and far from what other clients hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from holdfast.core.flat import Wire
from holdfast.core.registry import register, setting
from holdfast.core.types import Exchange, Field, Round, Schema, State, Steps
from holdfast.local.client import Local, Received
from holdfast.methods.base import MOST_SAMPLES, ClientRule, Fields, Method, ServerRule
from holdfast.methods.context import Context
from holdfast.methods.model_memory import forget, remember
from holdfast.methods.own_heads import as_of_one_model, head_of, under_own_heads
from holdfast.models.features import linear_head
from holdfast.models.heads import ReplacedHead, replace_head
from holdfast.models.network import Network

FAR = 50.0
"""How far below all others the logit of an absent class lies: never chosen, and its loss is still a
number."""
ROWS_AT_ONCE = 1024


class Present(ReplacedHead):
    """A head that knows only some of the classes; one without any class list knows all."""

    present: Tensor

    def __init__(self, head: nn.Module, classes: int, features: int):
        super().__init__(head)
        self.register_buffer("present", torch.zeros(classes))

    def forward(self, features: Tensor) -> Tensor:
        logits, here = self.inner(features), (self.present > 0) | ~(self.present > 0).any()
        least = torch.where(here, logits, torch.inf).amin(1, keepdim=True).detach()
        return torch.where(here, logits, least - FAR)


class FedGCClient(ClientRule):
    """Train body and head on the classes at hand; send both, and which classes these are."""

    only_fit = True

    def network(self, module: nn.Module) -> nn.Module:
        return replace_head(module, self.head_name, Present)

    def shared(self, network: Network, round: int) -> Tensor:
        return ~network.layout.under(f"{network.head_name}.present")

    def init(self, local: Local) -> State:
        return {"own": local.initial}

    def schema(self, task: str, wire: Wire) -> Schema:
        classes = linear_head(wire.model)[0].shape[:1]
        return {
            **super().schema(task, wire),
            "held": Field("count", classes, low=0, high=MOST_SAMPLES, of_samples=True),
        }

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        start = self._whole(local, state, received)
        fitted = local.fit(start)
        return {"own": fitted.model}, local.report(fitted.model, received, fitted) | {"held": _held(local)}

    def committee_model(self, local: Local, state: State, received: Received) -> Tensor:
        return self._whole(local, state, received)

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return self._whole(local, state, received)

    def _whole(self, local: Local, state: State, received: Received) -> Tensor:
        """What was sent, in a model that knows the client's own classes."""
        model, place = (
            received.into(state["own"]).clone(),
            local.network.layout.under(f"{local.network.head_name}.present"),
        )
        model[:, place.to(model.device)] = (_held(local) > 0).to(model)
        return model


def _held(local: Local) -> Tensor:
    """[n, classes]: how many samples of each class a client trains on."""
    data, classes = local.data, linear_head(local.network.layout)[0].shape[0]
    return local.initial.new_zeros(local.n, classes).scatter_add_(
        1, data.labels, data.mask.to(local.initial.dtype)
    )


def correction(rows: Tensor, held: Tensor, alike: bool) -> Tensor:
    """The gradient of the regulariser by the embeddings [clients, classes, d], of which clients hold some.
    For each that is held,

        -log( exp(w_kc . m_c) / (exp(w_kc . m_c) + sum of exp(w_kc . w_zj) over other clients z and the
        classes j they hold) )

    where m_c is the mean embedding of class c, which is kept fixed: with one client for each class that is
    the embedding itself, as in the paper. Classes that several clients hold are not driven apart, unless
    `alike`: then j may be c."""
    k, c = held.nonzero(as_tuple=True)
    owned = held.to(rows.dtype)
    means = torch.einsum("kc,kcd->cd", owned, rows) / owned.sum(0).clamp(min=1)[:, None]
    w = rows[k, c].detach().requires_grad_()
    total = torch.zeros_like(w)
    for part in torch.arange(len(w)).split(ROWS_AT_ONCE):
        with torch.enable_grad():
            near = (w[part] * means[c[part]]).sum(1, keepdim=True)
            against = (k[part][:, None] != k) & (True if alike else c[part][:, None] != c)
            others = torch.where(against, w[part] @ w.T, -torch.inf)
            value = (torch.cat([near, others], 1).logsumexp(1) - near[:, 0]).sum()
        total += torch.autograd.grad(value, w)[0]
    out = torch.zeros_like(rows)
    out[k, c] = total
    return out


class FedGCServer(ServerRule):
    """Average the models, and correct the heads. `models` are the head of each client in `ids` and, behind
    it, which classes it holds."""

    method: FedGC

    def init(self, ctx: Context) -> State:
        empty = ctx.initial.new_zeros(0, int(head_of(ctx).sum()) + linear_head(ctx.layout)[0].shape[0])
        return {"model": ctx.initial, "ids": torch.zeros(0, dtype=torch.int64), "models": empty}

    def round(self, state: State, ctx: Context) -> Round:
        model = state["model"]
        asked = self._sent(state, ctx, ctx.ask("train", model))
        up = yield asked
        state, up, verdict = yield from ctx.judge(state, as_of_one_model(up, asked, model, ctx.wire), model)
        merged = yield from ctx.merge(state, up, model, verdict)
        replies = up.clients()
        sent = (replies["update"] + ctx.wire.split(model)[0])[:, head_of(ctx)]
        state = remember(
            forget(merged.state, verdict.banned),
            replies.ids,
            torch.cat([sent, (replies["held"] > 0).to(sent)], 1),
        )
        with ctx.timer.part("correct"):
            heads, notes = self._corrected(state, ctx, replies.ids)
        verdict = replace(merged.verdict, notes=(*merged.verdict.notes, *notes))
        return {**state, "models": heads, "model": merged.model}, verdict

    def deliver(self, state: State, ctx: Context, ids: Tensor) -> Steps[Exchange]:
        yield from ()
        return self._sent(state, ctx, ctx.ask("deliver", state["model"], ids))

    def _corrected(self, state: State, ctx: Context, replies: Tensor) -> tuple[Tensor, tuple[str, ...]]:
        """One step, of the heads that came in this round; those of other clients are only repelled from."""
        weight, heads = linear_head(ctx.wire.layout(ctx.layout))[0], state["models"].clone()
        head = head_of(ctx).nonzero().flatten()
        rows = ((head >= weight.start) & (head < weight.stop)).nonzero().flatten()
        embeddings, held = heads[:, rows].view(len(heads), *weight.shape), heads[:, len(head) :] > 0
        gradient = correction(embeddings, held, self.method.against == "everything").flatten(1)
        heads[:, rows] -= (
            self.method.lam
            * self.method.lr
            * torch.where(torch.isin(state["ids"], replies).to(gradient.device)[:, None], gradient, 0.0)
        )
        if bool(torch.isfinite(heads).all()):
            return heads, ()
        return state["models"], (
            "the correction is not finite: heads stay as they were sent; try a lower method.lam",
        )

    def _sent(self, state: State, ctx: Context, asked: Exchange) -> Exchange:
        head = head_of(ctx)
        return under_own_heads(
            asked, state["model"], head, state["ids"], state["models"][:, : int(head.sum())]
        )


@register(
    "method",
    "fedgc",
    paper="Niu, Deng, Federated Learning for Face Recognition with Gradient Correction, AAAI 2022",
)
class FedGC(Method):
    """Heads that know only their client's classes, which the server keeps apart by one step on a softmax of
    all class embeddings.

    Body and head travel, both ways; the body is averaged, the head comes back corrected. The head must be one
    linear layer. It travels at full width, rows of absent classes included, and beside it how many samples of
    each class the client has. An absent class is never chosen: a test sample of it counts as a mistake. A
    client first seen late starts from the averaged head. The paper has one client for each class; where
    several hold a class, each is drawn to the class's mean, and they are driven apart only where `against` is
    "all"."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "body and head, corrected by the server",
        "what a client keeps": "which classes it has",
        "personal model": "the received model, for these classes only",
        "what that says, beyond the update itself": "`held`: how many samples of every class",
    }
    Client = FedGCClient
    Server = FedGCServer
    models = ("personal",)
    deploys = "personal"
    search: ClassVar[dict[str, tuple[float, ...]]] = {"lam": (0.1, 1.0, 10.0)}
    lam: float = setting(1.0, "strength of the correction (0: none)", ge=0)
    lr: float = setting(
        0.01, "the step is lam times this, which is meant to be the clients' learning rate", ge=0
    )
    against: Literal["other-classes", "everything"] = setting(
        "other-classes",
        "what an embedding is driven from: other clients' other classes, or all that they hold, its own"
        " class too",
    )
