"""FedPAC. Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier
Collaboration, ICLR 2023.

Clients train their head under a frozen body, then the body under the frozen head, pulled to the common
prototypes of the classes (feature alignment). Bodies are averaged. Heads are mixed, for each client its own
way: with the weights that should serve this client best, given how far its classes' features are from the
others' (a bias) and how much the others' scatter (a variance): a small quadratic programme for each client
(classifier collaboration)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from holdfast.aggregators.mixture import Mixture
from holdfast.core.flat import Wire
from holdfast.core.recorded_table import RecordedTable
from holdfast.core.registry import register, setting
from holdfast.core.simplex import least
from holdfast.core.types import Exchange, Field, Round, Schema, State, Steps, Uplink, Verdict
from holdfast.evaluation.prototypes import Prototypes, apart, averaged, prototypes
from holdfast.local.client import Local, Received
from holdfast.local.losses import Batch, Loss
from holdfast.methods.base import MOST_SAMPLES, ClientRule, Fields, Method, ServerRule
from holdfast.methods.context import Context
from holdfast.methods.finetuning import fit_part
from holdfast.methods.model_memory import remember
from holdfast.methods.own_heads import as_of_one_model, head_of, under_own_heads
from holdfast.models.features import catching, head_sizes


def aligned(net: nn.Module, batch: Batch, *, loss: Loss, head: str | None) -> Tensor:
    """The usual loss and lambda * the mean squared distance of the features to the common prototype of the
    class."""
    with catching(net, head) as found:
        values = loss(net, batch)
    return values + batch.aux["lam"] * apart(found[0], batch.aux["prototypes"], batch.aux["known"], batch.y)


class FedPACClient(ClientRule):
    """Measure the features, train the head, train the body; send the model and what the classes look like."""

    method: FedPAC

    def init(self, local: Local) -> State:
        return {"own": local.initial}

    def schema(self, task: str, wire: Wire) -> Schema:
        classes, width = head_sizes(wire.model)
        features = Field("feature", (classes, width))
        held, variance = (
            Field("count", (classes,), low=0, high=MOST_SAMPLES, of_samples=True),
            Field("score", low=0),
        )
        return {
            **super().schema(task, wire),
            "prototypes": features,
            "held": held,
            "h": features,
            "variance": variance,
        }

    def trainings(self) -> Mapping[str, int]:
        return {"train/head": 1, "train/fit": 1}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        method, network, start = self.method, local.network, received.into(state["own"])
        head, aux = network.head, {"lam": local.settings.lam.to(start), **self._aim(local, start, extra)}
        seen = self._seen(local, start) if method.statistics == "received" else None
        begun = fit_part(local, start, head, purpose="head", epochs=method.head_epochs).model
        loss = partial(aligned, loss=local.recipe.loss, head=network.head_name)
        fitted = fit_part(local, begun, ~head, loss=loss, aux=aux)
        own = self._seen(local, fitted.model)
        variance, h = statistics(seen or own)
        sent = {"prototypes": own.means, "held": own.counts.to(start.dtype), "h": h, "variance": variance}
        return {"own": fitted.model}, local.report(fitted.model, received, fitted) | sent

    def committee_model(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])

    def _seen(self, local: Local, model: Tensor) -> Prototypes:
        network = local.network
        return prototypes(
            network,
            model,
            local.samples,
            local.data,
            local.plan,
            network.head_name,
            head_sizes(network.layout)[0],
        )

    def _aim(self, local: Local, start: Tensor, extra: Fields) -> Fields:
        """The common prototypes; a copy that is only trained for evaluation has none, and no pull."""
        if "known" in extra:
            return {name: extra[name].to(start) for name in ("prototypes", "known")}
        classes, width = head_sizes(local.network.layout)
        return {
            "prototypes": start.new_zeros(local.n, classes, width),
            "known": start.new_zeros(local.n, classes),
        }


def statistics(seen: Prototypes) -> tuple[Tensor, Tensor]:
    """V [n] and h [n, classes, d] of each client: h_c = p_c mu_c, and V = (sum_c p_c E|f_c|^2 - p_c^2
    |mu_c|^2) / samples, which is the trace that the authors take of a d x d matrix, by lengths alone."""
    samples = seen.counts.sum(1).to(seen.means.dtype)
    share = seen.counts / samples.clamp(min=1)[:, None]
    h = share[..., None] * seen.means
    variance = ((share * seen.squares).sum(1) - h.square().sum((1, 2))) / samples.clamp(min=1)
    return variance.clamp(min=0), h  # below 0 only by rounding


def mixtures(variance: Tensor, h: Tensor, smallest: float) -> tuple[Tensor, list[int]]:
    """Row i: the weights alpha_i of all heads in that of client i, min a^T (diag(V) + B_i) a on the simplex,
    where B_i[j, l] is the sum over classes of <h_i - h_j, h_i - h_l>; small weights are dropped. Also the
    clients without a finite solution, which keep their own heads."""
    flat = h.flatten(1).double()
    inner, out, alone = flat @ flat.T, torch.eye(len(h), dtype=torch.float64), []
    for i in range(len(h)):
        bias = inner[i, i] - inner[i][:, None] - inner[i][None, :] + inner
        weights = least(torch.diag(variance.double()) + bias)
        if weights is None:
            alone.append(i)
            continue
        kept = torch.where(weights < smallest, 0.0, weights)
        out[i] = kept / kept.sum() if bool(kept.sum() > 0) else weights
    return out, alone


class FedPACServer(ServerRule):
    """Average the models; then mix a head for each client that sent one. `models` are these heads, `ids`
    their clients."""

    method: FedPAC

    def init(self, ctx: Context) -> State:
        classes, width = head_sizes(ctx.layout)
        zeros = ctx.initial.new_zeros
        heads = {"ids": torch.zeros(0, dtype=torch.int64), "models": zeros(0, int(head_of(ctx).sum()))}
        return {"model": ctx.initial, **heads, "prototypes": zeros(classes, width), "known": zeros(classes)}

    def round(self, state: State, ctx: Context) -> Round:
        model = state["model"]
        extra = {
            name: state[name].expand(len(ctx.cohort), *state[name].shape) for name in ("prototypes", "known")
        }
        asked = self._sent(state, ctx, ctx.ask("train", model, **extra))
        up = yield asked
        state, up, verdict = yield from ctx.judge(state, as_of_one_model(up, asked, model, ctx.wire), model)
        merged = yield from ctx.merge(state, up, model, verdict)
        replies = up.clients()
        replies = replies.only(replies["held"].sum(1) > 0)  # a client without samples has no features
        mixed = self._mixed(merged.state, ctx, replies, model, merged.verdict)
        state, verdict = yield from ctx.timer.steps("heads", mixed)
        prototypes, known = averaged(
            replies["prototypes"], replies["held"], self.method.weighting, state["prototypes"], state["known"]
        )
        return {**state, "model": merged.model, "prototypes": prototypes, "known": known}, verdict

    def deliver(self, state: State, ctx: Context, ids: Tensor) -> Steps[Exchange]:
        yield from ()
        return self._sent(state, ctx, ctx.ask("deliver", state["model"], ids))

    def _mixed(
        self, state: State, ctx: Context, replies: Uplink, model: Tensor, verdict: Verdict
    ) -> Steps[tuple[State, Verdict]]:
        head = head_of(ctx)
        sent = replies["update"][:, head] + ctx.wire.split(model)[0][head]
        alpha, alone = mixtures(replies["variance"], replies["h"], self.method.smallest)
        place, table = (
            torch.isin(verdict.ids, replies.ids),
            torch.zeros(len(verdict.ids), len(verdict.ids), dtype=torch.float64),
        )
        table[place.nonzero(), place.nonzero().T] = alpha
        notes = tuple(
            f"client {int(replies.ids[i])} keeps its own head: its mixture has no finite solution"
            for i in alone
        )
        verdict = replace(verdict, tables={**verdict.tables, "alpha": table}, notes=(*verdict.notes, *notes))
        return remember(state, replies.ids, (yield Mixture(alpha, sent))), verdict

    def _sent(self, state: State, ctx: Context, asked: Exchange) -> Exchange:
        return under_own_heads(asked, state["model"], head_of(ctx), state["ids"], state["models"])


@register(
    "method",
    "fedpac",
    paper="Xu, Tong, Huang, Personalized FL with Feature Alignment and Classifier Collaboration, ICLR 2023",
)
class FedPAC(Method):
    """An averaged body, features aligned to common prototypes, and for each client a head mixed from those of
    all clients by a quadratic programme.

    Up go the model, class means, and for the mixture a variance and the class means times the classes'
    shares; down come the body, the client's own mixture, which the server keeps until the client is asked
    again, and the prototypes. A client first seen late starts from the common head, which is averaged like
    the body. A client that a detector rejects is in no mixture. The programme's matrix is made positive by
    lifting its small eigenvalues."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": (
            "up model, class means and statistics; down body, a head mixed for the client, prototypes"
        ),
        "what a client keeps": "its trained model, used until another is sent",
        "personal model": "received body under the head mixed for the client",
        "what that says, beyond the update itself": (
            "model, class means, class counts and feature statistics"
        ),
    }
    Client = FedPACClient
    Server = FedPACServer
    tables = {
        "alpha": RecordedTable(
            "how much of each client's head went into the head of each client", kind="pairs", share=True
        )
    }
    models = ("personal",)
    deploys = "personal"
    search: ClassVar[dict[str, tuple[float, ...]]] = {"lam": (0.1, 1.0, 5.0, 10.0)}
    lam: float = setting(1.0, "strength of the pull of features to the common prototype of their class", ge=0)
    head_epochs: int = setting(1, "epochs of the head, before the body's", ge=0)
    smallest: float = setting(1e-3, "weights in a mixture below this are 0", ge=0, lt=1)
    statistics: Literal["received", "trained"] = setting(
        "received", "features for the mixture: those of the body before or after training"
    )
    weighting: Literal["samples", "equal"] = setting(
        "samples", "how clients count in the prototype of a class they hold"
    )
