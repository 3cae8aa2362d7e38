"""FedAMP. Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on Non-IID
Data, AAAI 2021.

There is no global model. The server keeps every client's last model w_j and mixes for client i its own u_i,
in which a client has the more weight the closer it is (Algorithm 1, attentive message passing):

    u_i = (1 - sum_j xi_ij) w_i + sum_j xi_ij w_j,
    xi_ij = alpha A'(|w_i - w_j|^2),   A(x) = 1 - exp(-x / sigma).

The client continues from its own model, pulled to u_i: min F_i(w) + lambda / (2 alpha) |w - u_i|^2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.mixture import Mixture
from holdfast.aggregators.similarity import Distances
from holdfast.core.recorded_table import RecordedTable
from holdfast.core.registry import register, setting
from holdfast.core.types import Exchange, Round, State, Steps, Verdict
from holdfast.local.client import Local, Received
from holdfast.methods import model_memory
from holdfast.methods.base import ClientRule, Fields, Method, ServerRule
from holdfast.methods.context import Context


class FedAmpClient(ClientRule):
    """Go on training the own model, pulled to the mixture that the server sent."""

    only_fit = True

    def init(self, local: Local) -> State:
        return {"own": local.initial}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        own = state["own"]
        fitted = local.fit(own, pull=(received.into(own), local.settings.lam / local.settings.alpha))
        return {"own": fitted.model}, local.report(fitted.model, received, fitted)

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return state["own"]


class FedAmpServer(ServerRule):
    """Keep the last models, and send each client its own mixture of them."""

    method: FedAmp

    def init(self, ctx: Context) -> State:
        return model_memory.empty(ctx)

    def round(self, state: State, ctx: Context) -> Round:
        sent, xi = yield from ctx.timer.steps("attend", self.mixtures(state, ctx, ctx.cohort))
        up = yield _each_its_own("train", ctx.cohort, sent)
        answered = torch.isin(ctx.cohort, up.ids)
        trained = ctx.wire.moved(sent[answered], up["update"], up["buffers"])
        tables = {"attention": xi[answered], "attended": state["ids"]}
        return model_memory.remember(state, up.ids, trained), Verdict(up.ids, tables=tables)

    def deliver(self, state: State, ctx: Context, ids: Tensor) -> Steps[Exchange]:
        sent, _ = yield from self.mixtures(state, ctx, ids)
        return _each_its_own("deliver", ids, sent)

    def mixtures(self, state: State, ctx: Context, ids: Tensor) -> Steps[tuple[Tensor, Tensor]]:
        """u [n, size], and xi [n, kept models]. A client that has sent nothing yet counts as having the start
        model. The distance of two models is that of their parameters: counters and running statistics of
        BatchNorm are mixed, but do not count."""
        method, own = self.method, model_memory.last_models(state, ids, ctx.initial)
        known = torch.cat([state["models"], ctx.initial[None]])
        apart = (yield Distances(ctx.wire.split(known)[0]))[:, :-1]
        del known  # a copy of all models
        rows = torch.where(
            torch.isin(ids, state["ids"]), torch.searchsorted(state["ids"], ids), len(state["ids"])
        )
        xi = method.alpha * torch.exp(-apart[rows] / method.sigma) / method.sigma
        xi[ids[:, None] == state["ids"]] = 0.0
        xi *= ((1 - method.least_own) / xi.sum(1, keepdim=True).clamp(min=1e-300)).clamp(
            max=1
        )  # a mixture: no weight is below 0
        weights = xi.to(own.dtype)
        rest = (1 - weights.sum(1, keepdim=True)).to(own)
        return rest * own + (yield Mixture(weights, state["models"])), xi


def _each_its_own(task: str, ids: Tensor, models: Tensor) -> Exchange:
    return Exchange(task, ids, models, torch.arange(len(ids))[:, None])


@register(
    "method",
    "fedamp",
    paper="Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021",
)
class FedAmp(Method):
    """No global model: each client is pulled to its own mixture of all clients' last models, in which those
    like it count most.

    What travels: a client's mixture down, its model up. The server keeps the last model of every client that
    has sent one; any other client counts as having the start model. Nothing is reduced to one model, so
    aggregators and detectors do not apply: the attention itself gives distant clients, and attackers, little
    weight. Where alpha is so large that the others would count more than 1 together (many clients that are
    alike), the paper's weights leave the mixture it asks for and the own model would count less than 0; here
    the others are scaled down instead. Defaults are PFLlib's, which mixes only what was sent in the round
    before, not every client's last model. Each round's attention is recorded in the verdict's tables."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "down a mixture of all models by attention, up the own one",
        "what a client keeps": "its model",
        "personal model": "the model that it keeps",
        "what that says, beyond the update itself": (
            "the server keeps every client's model and passes on mixtures"
        ),
    }
    Client = FedAmpClient
    Server = FedAmpServer
    models = ("personal",)
    deploys = "personal"
    reduces = False
    tables = {
        "attention": RecordedTable(
            "how much of each other client's last model each client was given",
            kind="mixture",
            columns="attended",
            share=True,
            note="the rest is its own last model",
        ),
        "attended": RecordedTable("clients whose models the server keeps", kind="ids"),
    }
    search: ClassVar[dict[str, tuple[float, ...]]] = {
        "sigma": (0.1, 1.0, 10.0, 100.0),
        "lam": (0.01, 0.1, 1.0),
    }
    lam: float = setting(
        1.0, "strength of the pull to the mixture, divided by alpha (0: local training)", ge=0
    )
    alpha: float = setting(1.0, "step size of the attention: how much others count", gt=0)
    sigma: float = setting(1.0, "squared distance over which attention falls to a third", gt=0)
    least_own: float = setting(0.0, "the least weight of a client's own model in its mixture", ge=0, le=1)
