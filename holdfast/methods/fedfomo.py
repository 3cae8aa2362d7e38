"""FedFomo. Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model
Optimization, ICLR 2021.

There is no global model. The server keeps every client's last model and sends a client the M that have helped
it most; the client tests them on validation data of its own and takes what helps. Against w_old, from which
its own last training began, model j has the weight

    omega_j = (L(w_old) - L(w_j)) / |w_j - w_old|,

where values below 0 become 0, and the rest are divided by their sum: w = sum_j omega_j w_j. If nothing helps,
the client keeps its own model. Then it trains. The server adds up the omega_j in a matrix of affinities:
which model helped which client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.core.flat import Wire
from holdfast.core.keys import mix
from holdfast.core.recorded_table import RecordedTable
from holdfast.core.registry import register, setting
from holdfast.core.types import Exchange, Field, Round, Schema, State, Steps, Verdict
from holdfast.data.client_rows import Padded, either
from holdfast.evaluation.evaluate import score
from holdfast.local.client import Local, Received
from holdfast.local.per_client import plain
from holdfast.methods import model_memory
from holdfast.methods.base import ClientRule, Fields, Method, ServerRule
from holdfast.methods.context import Context

MOST = 1e6
"""How much a model can serve or hurt: one whose loss is not finite hurts this much, and a false claim can be
no larger."""


class FedFomoClient(ClientRule):
    """Test the models of others, take what helps, train.

    The first place among the received models is for a client that has none of its own yet; the M others come
    after it."""

    begins_unsent = True
    method: FedFomo

    def init(self, local: Local) -> State:
        return {"own": local.initial, "old": local.initial}

    def schema(self, task: str, wire: Wire) -> Schema:
        return {
            **super().schema(task, wire),
            "affinity": Field("score", (self.method.others,), low=-MOST, high=MOST),
        }

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        local, held = self._held_back(local)
        own, old = received.into(state["own"]), received.into(state["old"])
        start, omega = self._mixed(local, held, own, old, received)
        fitted = local.fit(start)
        base = replace(
            received, bank=local.wire.pack(local.initial), pick=torch.arange(local.n)[:, None]
        )  # all that the server knows too
        reply = {**local.report(fitted.model, base, fitted), "affinity": omega}
        return {"own": fitted.model, "old": start}, reply

    def as_sent(self, local: Local, state: State, received: Received) -> tuple[Tensor, Tensor]:
        local, held = self._held_back(local)
        own, old = received.into(state["own"]), received.into(state["old"])
        return self._mixed(local, held, own, old, received)[0], local.wire.pack(local.initial)

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])

    def _mixed(
        self, local: Local, held: Padded, own: Tensor, old: Tensor, received: Received
    ) -> tuple[Tensor, Tensor]:
        """The model to begin with, and omega [n, M] of the models of others, below 0 where they hurt. The own
        model is a candidate too."""
        there = (received.pick[:, 1:] >= 0).to(own.device)
        if not bool(there.any()):  # no client has sent a model yet, or M = 0
            return own, own.new_zeros(local.n, self.method.others)
        before = self._loss(local, held, old)
        candidates = [received.models(1 + j) for j in range(received.pick.shape[1] - 1)]
        served = [self._served(local, held, before, old, model) for model in (own, *candidates)]
        omega = torch.stack(served, 1)
        omega[:, 1:] *= there
        share = omega.clamp(min=0)
        total = share.sum(1, keepdim=True)
        share = share / torch.where(total > 0, total, torch.ones_like(total))
        mixed = torch.zeros_like(own)
        for weight, model in zip(share.split(1, 1), (own, *candidates), strict=True):
            mixed = mixed + torch.where(weight > 0, weight * model, 0.0)  # 0 times NaN would be NaN
        return torch.where(total > 0, mixed, own), omega[:, 1:]

    def _served(self, local: Local, held: Padded, before: Tensor, old: Tensor, model: Tensor) -> Tensor:
        """omega_j. The distance of two models is that of their parameters; counters of BatchNorm do not
        count."""
        split = local.network.layout.split
        apart = (split(model)[0] - split(old)[0]).double().norm(dim=1)
        omega = (before - self._loss(local, held, model)) / torch.where(
            apart > 0, apart, torch.ones_like(apart)
        )
        return torch.where(apart > 0, omega, 0.0).nan_to_num(nan=0.0).clamp(-MOST, MOST).to(old.dtype)

    def _loss(self, local: Local, held: Padded, model: Tensor) -> Tensor:
        """Each client's mean cross-entropy on what it holds back; 0 for any model where that is nothing,
        infinite instead of NaN."""
        found = score(
            local.network, self.predict, model, torch.arange(local.n), local.samples, held, local.plan
        )
        return (
            (found.loss / found.total.clamp(min=1)).nan_to_num(nan=torch.inf).to(model.device)
        )  # scores are returned on the host

    def _held_back(self, local: Local) -> tuple[Local, Padded]:
        """Validation samples. A client that has none holds back a part of its training samples, the same in
        every round and for every model; one with a single sample has nothing to hold back."""
        count, share = local.data.count, plain(local.settings.held_back)
        wanted = (
            (count * share.cpu().double() + 1e-9)
            .floor()
            .long()
            .clamp(min=1)
            .minimum((count - 1).clamp(min=0))
        )
        back = torch.where((local.validation.count > 0) | (self.method.others == 0), 0, wanted)
        if not bool((back > 0).any()):
            return local, local.validation
        rows = local.data.rows
        in_place = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
        luck = torch.where(
            (back > 0).to(rows.device)[:, None], mix(rows), in_place
        )  # samples of a client may be in order of their classes
        held = local.data.drawn(luck, count - back, back)
        return replace(local, data=local.data.drawn(luck, torch.zeros_like(count), count - back)), either(
            local.validation, held
        )


class FedFomoServer(ServerRule):
    """Keep the last models and which model helped which client."""

    method: FedFomo

    def init(self, ctx: Context) -> State:
        return {**model_memory.empty(ctx), "affinity": torch.zeros(0, 0, dtype=ctx.initial.dtype)}

    def round(self, state: State, ctx: Context) -> Round:
        best = self._best(state, ctx, ctx.cohort)
        up = yield Exchange(
            "train",
            ctx.cohort,
            state["models"],
            torch.cat([torch.full_like(ctx.cohort, -1)[:, None], best], 1),
        )
        best = best[torch.isin(ctx.cohort, up.ids)]
        trained = ctx.wire.moved(ctx.initial, up["update"], up["buffers"])
        fresh = model_memory.remember(state, up.ids, trained)
        place = torch.searchsorted(fresh["ids"], state["ids"])
        affinity = torch.zeros(len(fresh["ids"]), len(fresh["ids"]), dtype=ctx.initial.dtype)
        affinity[place[:, None], place] = state["affinity"]
        row, column = torch.searchsorted(fresh["ids"], up.ids)[:, None].expand_as(best), best >= 0
        affinity[row[column], place[best[column]]] += up["affinity"][column]
        tables = {
            "affinity": up["affinity"].double(),
            "sent": torch.where(column, _at(state["ids"], best), -1),
        }
        return {**fresh, "affinity": affinity}, Verdict(up.ids, tables=tables)

    def deliver(self, state: State, ctx: Context, ids: Tensor) -> Steps[Exchange]:
        """A client that has never sent anything has no model and no affinities: it gets the mean of all
        models."""
        yield from ()
        models = state["models"]
        mean = models.mean(0) if len(models) else ctx.initial
        first = torch.where(torch.isin(ids, state["ids"]), -1, len(models))[:, None]
        return Exchange(
            "deliver",
            ids,
            torch.cat([models, mean[None]]),
            torch.cat([first, self._best(state, ctx, ids)], 1),
        )

    def _best(self, state: State, ctx: Context, ids: Tensor) -> Tensor:
        """[n, M]: places of the models that have served these clients best, never their own; ties are broken
        at random. -1: no more."""
        n, known, wanted = len(ids), len(state["ids"]), self.method.others
        affinity = torch.zeros(n, known, dtype=torch.float64)
        seen = torch.isin(ids, state["ids"])
        affinity[seen] = state["affinity"][torch.searchsorted(state["ids"], ids[seen])].double()
        affinity[ids[:, None] == state["ids"]] = -torch.inf
        order = ctx.key.fold("friends").fold(ids).hash(known).argsort(1)
        ranked = affinity.gather(1, order)
        by_rank = ranked.argsort(dim=1, descending=True, stable=True)
        order, ranked = order.gather(1, by_rank), ranked.gather(1, by_rank)
        best = torch.where(ranked > -torch.inf, order, -1)[:, :wanted]
        return torch.nn.functional.pad(best, (0, wanted - best.shape[1]), value=-1)


def _at(ids: Tensor, places: Tensor) -> Tensor:
    return ids[places.clamp(min=0)] if len(ids) else torch.full_like(places, -1)


@register(
    "method",
    "fedfomo",
    paper="Zhang et al., Personalized Federated Learning with First Order Model Optimization, ICLR 2021",
)
class FedFomo(Method):
    """No global model: a client tests the models that have helped it most on validation data of its own, and
    mixes what helps.

    What travels: up to M models of others down, one model and M numbers up; a client's own model is always
    among those it tests, but is not sent to it. Models that no client has sent are never sent on. Validation
    data is `data.split.validation`; a client without it holds back a part of its training samples. Nothing is
    reduced to one model, so aggregators and detectors do not apply: a client gives a harmful model weight 0.
    A client first seen late tests M models at random; one that never trained is scored with the mean of all
    models. M is PFLlib's default (FedCAP: half of the cohort). Differences: in PFLlib the own model takes one
    of the M places, ties are not broken at random, and models that no client sent may be sent on; FedCAP's
    port never mixes anything."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "down the models that served the client best, up the own one",
        "what a client keeps": "its model",
        "personal model": "the model that it keeps",
        "what that says, beyond the update itself": (
            "whose models serve this client's validation data, and models go from client to client"
        ),
    }
    Client = FedFomoClient
    Server = FedFomoServer
    models = ("personal",)
    deploys = "personal"
    reduces = False
    tables = {
        "affinity": RecordedTable("how much each model that a client was sent helped it", kind="pairs"),
        "sent": RecordedTable("clients whose models each client was sent (-1: no more)", kind="pairs"),
    }
    search: ClassVar[dict[str, tuple[float, ...]]] = {"others": (2, 5, 10)}
    others: int = setting(5, "M: how many models of others a client is sent (0: local training)", ge=0)
    held_back: float = setting(
        0.2,
        "share of the training samples that a client without validation samples tests models on",
        gt=0,
        lt=1,
    )
