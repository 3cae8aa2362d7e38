"""FedCAP. Li et al.: FedCAP: Robust Federated Learning via Customized Aggregation and Personalization, ACSAC
2024.

The server keeps, of the last cohort, the models that clients ended with (recovered, w~_i) and how far those
are from one common reference model w (calibrated updates d~_i). From them it makes each client a model of its
own: similar clients have more weight (Eq. 3 to 5). A client that ends too far from the reference is banned.
The client trains the model it is sent, and a private one that is pulled to it (Eq. 7).

A client that was not in the last cohort has no calibrated update. It is asked for one first: the server sends
the reference against which the pool was calibrated, the client trains from it and sends only the difference
(`request`). Late joiners get their model the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from holdfast.aggregators.mixture import Mixture
from holdfast.aggregators.similarity import Cosines, Lengths
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Wire
from holdfast.core.recorded_table import RecordedTable
from holdfast.core.registry import register, setting
from holdfast.core.types import Exchange, Round, Schema, State, Steps, Uplink, Verdict, broadcast
from holdfast.detectors.computations import Sound
from holdfast.detectors.norm import PAPER, Norm
from holdfast.local.client import Local, Received
from holdfast.methods.base import ClientRule, Fields, FinishedRun, Method, ServerRule
from holdfast.methods.context import Context, laid_out

POOL = ("pool/ids", "pool/models", "pool/updates", "pool/counts")


class FedCapClient(ClientRule):
    """Train the received model for the server and, unless switched off, a private one for the client
    itself."""

    only_fit = True
    method: FedCap
    tasks = frozenset({"train", "request"})
    quiet = optional = frozenset({"request"})
    models_per_client = 2

    def trainings(self) -> Mapping[str, int]:
        return {"train/fit": 2 if self.method.personalise else 1, "request/fit": 0}

    def schema(self, task: str, wire: Wire) -> Schema:
        usual = super().schema(task, wire)
        if task != "request":
            return usual
        weighed = (
            self.method.reference == "customised"
        )  # then the server averages the models that it sends by samples, before clients train
        return {name: usual[name] for name in ("update", "count") if name == "update" or weighed}

    def init(self, local: Local) -> State:
        return {"personal" if self.method.personalise else "own": local.initial}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        if not self.method.personalise:  # as fedavg-ft: a client uses what it trained
            fitted = local.fit(received.model)
            return {"own": fitted.model}, local.report(fitted.model, received, fitted)
        pull = torch.cat([torch.zeros_like(local.settings.lam), local.settings.lam])
        both = local.fit(
            torch.cat([received.model, state["personal"]]), pull=(received.model, pull)
        )  # Eq. 7, on the same batches
        w, v = both.model.split(local.n)
        return {"personal": v}, local.report(w, received, both)

    def request(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[None, Fields]:
        """d_k = w_k - w: where the client's data would lead from the reference. Nothing of it is kept."""
        fitted = local.fit(received.model)
        report = local.report(fitted.model, received, fitted)
        return None, {name: report[name] for name in self.schema("request", local.wire)}

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return state["personal" if self.method.personalise else "own"]


class FedCapServer(ServerRule):
    """State: `model` is the reference of the next round (w, Eq. 6), `previous` the one against which the pool
    was calibrated."""

    method: FedCap

    def init(self, ctx: Context) -> State:
        state = {"model": ctx.initial}
        if self.method.removal == "ignored":
            state["banned"] = torch.zeros(0, dtype=torch.int64)
        if not self.method.customise:
            return state
        if self.method.phi == "uniform" and self.method.variant == "authors":
            state["first"] = torch.zeros(
                (), dtype=torch.int64
            )  # the size of the first pool, once there is one
        if self.method.similarity == "head" and ctx.head is None:
            raise ConfigError(
                'method.similarity = "head" needs a model with a head; name it, as in'
                " holdfast.Model(module, head='fc')"
            )
        rows = {"models": ctx.wire.size, "updates": ctx.wire.parameters}
        pools = {f"pool/{name}": torch.zeros(0, size, dtype=ctx.initial.dtype) for name, size in rows.items()}
        no_clients = {
            "pool/ids": torch.zeros(0, dtype=torch.int64),
            "pool/counts": torch.zeros(0, dtype=ctx.initial.dtype),
        }
        return state | {"previous": ctx.initial} | pools | no_clients

    def round(self, state: State, ctx: Context) -> Round:
        if (
            "banned" in state
        ):  # they are drawn, but neither asked nor sent anything, nor may they judge others
            cohort, available = (
                ids[~torch.isin(ids, state["banned"])] for ids in (ctx.cohort, ctx.available)
            )
            ctx = replace(ctx, cohort=cohort, available=available)
        weights, counts = yield from self._weights(state, ctx, ctx.cohort)
        asked = yield from _customised(ctx, ctx.ask("train", state["model"]), state, weights)  # what^t, Eq. 3
        reference = yield from self._reference(state, ctx, asked, weights, counts)  # w^t
        up = yield asked
        with ctx.timer.part("calibrate"):
            recovered, calibrated = (
                _calibrated(asked, up, reference, ctx.wire) if self.method.customise else (up["update"], up)
            )
        judged = calibrated if self.method.calibrate else up
        state, passed, verdict = yield from ctx.judge(state, judged, reference, own=self.method.detectors())
        kept, verdict = yield from _finite(passed, calibrated, verdict)
        merged = yield from ctx.merge(
            state, calibrated.only(kept), reference, verdict
        )  # with the mean this is Eq. 6: survivors' w~, by samples
        state, verdict = merged.state, merged.verdict
        if self.method.customise:
            recorded = {
                "customisation": weights,
                "customisation/pool": state["pool/ids"],
                "norms/sent": (yield from _sent(up, verdict)),
            }
            verdict = replace(verdict, tables={**verdict.tables, **recorded})
        if "banned" in state:
            state = state | {
                "banned": (
                    torch.cat([state["banned"], torch.tensor([*verdict.banned], dtype=torch.int64)]).unique()
                )
            }
        survivors = kept & up.is_client
        if not bool(
            survivors.any()
        ):  # no client is left: reference and pools stay, so that they still belong together
            return state | _without(state, verdict), verdict
        if not self.method.customise:
            return state | {"model": merged.model}, verdict
        pools = (up.ids[survivors], recovered[survivors], judged["update"][survivors], up["count"][survivors])
        if "first" in state and not state["first"]:
            state = state | {"first": survivors.sum()}
        return (
            state
            | {
                "model": merged.model,
                "previous": reference,
                **dict(zip(POOL, pools, strict=True)),
            },
            verdict,
        )

    def deliver(self, state: State, ctx: Context, ids: Tensor) -> Steps[Exchange]:
        """Members of the pool from the pool; all others are asked for an update first, as in a round."""
        weights, _ = yield from self._weights(state, ctx, ids)
        return (yield from _customised(ctx, broadcast("deliver", state["model"], ids), state, weights))

    def _weights(self, state: State, ctx: Context, ids: Tensor) -> Steps[tuple[Tensor, Tensor]]:
        """How much each client is given of each model in the pool: p' [n, m], a row of zeros where it gets
        the reference model; and how many samples each is known to have."""
        pool = state.get("pool/ids", ids[:0])
        weights, counts = (
            torch.zeros(len(ids), len(pool), dtype=torch.float64),
            torch.zeros(len(ids), dtype=ctx.initial.dtype),
        )
        if not len(pool) or not len(ids):
            return weights, counts
        place, updates, similar = (
            torch.searchsorted(pool, ids).clamp(max=len(pool) - 1),
            state["pool/updates"],
            torch.zeros_like(weights),
        )
        known = pool[place] == ids
        counts[known] = state["pool/counts"][place[known]]
        if bool(known.any()):
            similar[known] = yield from self._similar(ctx, updates[place[known]], updates)
        if not bool(known.all()):
            up = yield ctx.ask("request", state["previous"], ids[~known])
            answered = torch.searchsorted(ids, up.ids)  # the others' requests were lost or refused
            counts[answered] = up.fields.get("count", counts[answered])
            similar[answered] = yield from self._similar(ctx, up["update"], updates)
            known = known.index_fill(0, answered, True)
        own = ids[:, None] == pool
        weights[known] = customisation(similar, own, self.method.alpha, self._share(state))[known]
        return weights, counts

    def _share(self, state: State) -> float | str:
        """phi. The released code computes a uniform share once, from its first pool, and keeps it when later
        pools are smaller."""
        return 1 / int(state["first"]) if "first" in state and state["first"] else self.method.phi

    def _similar(self, ctx: Context, updates: Tensor, pool: Tensor) -> Steps[Tensor]:
        """Eq. 4."""
        if self.method.similarity == "head":
            updates, pool = updates[:, ctx.head], pool[:, ctx.head]
        return (yield from ctx.timer.computing("aggregate", Cosines(updates, pool)))

    def _reference(
        self, state: State, ctx: Context, asked: Exchange, weights: Tensor, counts: Tensor
    ) -> Steps[Tensor]:
        """What this round's updates are calibrated against: Eq. 6, or Algorithm 1's line 7, the mean of the
        models that are sent."""
        served = weights.sum(1) > 0
        if self.method.reference == "recovered" or not bool(served.any()):
            return state["model"]
        shares = ctx.priors(Uplink(ctx.cohort[served], {"count": counts[served]}))
        return (yield from ctx.timer.computing("aggregate", Mixture(shares, asked.bank[1:])))


def customisation(similar: Tensor, own: Tensor, alpha: float, phi: float | str) -> Tensor:
    """Eq. 5 as released: p'_kk = phi, the rest shared out by the softmax of alpha * p_ki over i != k; without
    a self term where k is not in the pool. `own` [n, m] marks a client's own model."""
    others = torch.softmax((alpha * similar).masked_fill(own, -torch.inf), dim=1).nan_to_num(nan=0.0)
    share = 1 / own.shape[1] if phi == "uniform" else float(phi)
    kept = own.any(1, keepdim=True) * torch.full_like(others[:, :1], share)
    kept[others.sum(1) == 0] = 1.0  # no other client is in the pool
    return (1 - kept) * others + kept * own


def _customised(ctx: Context, asked: Exchange, state: State, weights: Tensor) -> Steps[Exchange]:
    """The same request with each client's own model, what_k = sum of p'_ki w~_i, in place of the common one;
    buffers are averaged with the same weights. The server's own pseudo-client, and clients without weights,
    get the common one."""
    served = weights.sum(1) > 0
    if not bool(served.any()):
        return asked
    mixing = Mixture(weights[served], state["pool/models"])
    bank = torch.cat([asked.bank, (yield from ctx.timer.computing("aggregate", mixing))])
    pick = asked.pick.clone()
    pick[asked.is_client] = torch.where(served, served.cumsum(0), 0)[:, None]
    return replace(asked, bank=bank, pick=pick)


def _calibrated(asked: Exchange, up: Uplink, reference: Tensor, wire: Wire) -> tuple[Tensor, Uplink]:
    """w~_k = what_k + d_k with the buffers that came with it, and the replies with d~_k = w~_k - w as their
    update."""
    sent = asked.sent_to(up.ids)
    recovered = wire.moved(sent, up["update"], up["buffers"])
    away = wire.split(sent)[0] - wire.split(reference)[0]
    return recovered, up.having(update=up["update"] + away)  # exact where a client was sent the reference


def _finite(passed: Uplink, calibrated: Uplink, verdict: Verdict) -> Steps[tuple[Tensor, Verdict]]:
    """The clients that stay: those that the detectors accepted, without models that overflowed when an
    accepted update was added."""
    finite = yield Sound(calibrated["update"])
    kept = torch.isin(calibrated.ids, passed.ids)
    rejected = {
        client: "recovered model is not finite"
        for client in calibrated.ids[kept & ~finite & calibrated.is_client].tolist()
    }
    return kept & finite, replace(verdict, rejected={**verdict.rejected, **rejected})


def _sent(up: Uplink, verdict: Verdict) -> Steps[Tensor]:
    """The lengths of the updates before they were calibrated, beside those of the verdict."""
    clients = up.clients()
    return laid_out((yield Lengths(clients["update"])), clients.ids, verdict.ids)


def _without(state: State, verdict: Verdict) -> State:
    """The pools without clients that have just been banned."""
    if "pool/ids" not in state:
        return {}
    left = ~torch.isin(state["pool/ids"], torch.tensor([*verdict.banned], dtype=torch.int64))
    return {name: state[name][left] for name in POOL}


# ---- results that only its runs have


def pooled(run: FinishedRun) -> State:
    """Return the server's state, with the pools from which a late joiner's model is made."""
    state = run.server_state()
    if "pool/ids" not in state:
        raise ConfigError(
            f"{run.path}: this run keeps no pools to customise a model from; set customise = true"
        )
    return state


def reference(run: FinishedRun) -> nn.Module:
    """Return the model from which a late joiner trains: `customise` takes the change that this makes."""
    return run.module(pooled(run)["previous"])


def customise(run: FinishedRun, update: Tensor | Mapping[str, Tensor]) -> nn.Module:
    """Return the model of a client that joins now, from the pools of the last cohort. `update` is what
    training from `reference()` changed: a vector of all parameters, or tensors by name."""
    pooled(run)
    vector = run.parameters_of(update, "customise")[None]
    sent = run.delivered(
        run.new_client_id(),
        lambda schema: {name: vector if name == "update" else vector.new_zeros(1) for name in schema},
        "customise",
    )
    return run.module(sent.bank[sent.pick[0, 0]]).eval()


@register("method", "fedcap", paper=PAPER)
class FedCap(Method):
    """A model for each client from those of similar clients, a ban on models far from the common one, and a
    private model pulled to it.

    Without any of its four switches this is `fedavg-ft`, with `personalise` alone `ditto`. The experiment's
    aggregator makes the reference model from the calibrated updates; the paper's is the mean. A client
    outside the last cohort costs a second trip and a second training. `variant = "authors"`: banned clients
    are still drawn, but left out, and a uniform phi is that of the first pool."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "down a mixture of the last cohort's models, up the update",
        "what a client keeps": "a second model, pulled to the received one",
        "personal model": "that second model",
        "what that says, beyond the update itself": (
            "the server recovers single models from updates to find who is alike; customised "
            "models are mixtures of them"
        ),
    }
    Client = FedCapClient
    Server = FedCapServer
    models = ("global", "customised", "personal")
    deploys = "personal"
    results = {"pooled": pooled, "reference": reference, "customise": customise}
    tables = {
        "norms/sent": RecordedTable(
            "length of each client's update as it was sent, before it was calibrated",
            title="Length of the update as sent",
        ),
        "customisation": RecordedTable(
            "how much of each pooled model each client was given",
            kind="mixture",
            rows="cohort",
            columns="customisation/pool",
            share=True,
        ),
        "customisation/pool": RecordedTable("clients whose models are in the pool", kind="ids"),
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {"authors": {"removal": "ignored"}}
    search = {"alpha": (2.0, 5.0, 10.0), "phi": (0.1, 0.2, 0.3), "lam": (0.1, 0.5, 1.0)}
    alpha: float = setting(
        10.0,
        "sharpness of the softmax over cosine similarity; 0 weighs all clients equally; 2 for skewed"
        " features",
        ge=0,
    )
    phi: Annotated[float, Field(ge=0, le=1)] | Literal["uniform"] = setting(
        0.3, "a client's own share of its customised model, in [0, 1]; uniform: one by the size of the pool"
    )
    lam: float = setting(
        0.1, "strength of the pull of the private model to the customised one (0: local training)", ge=0
    )
    t_norm: float = setting(10.0, "largest length of a calibrated update that passes", gt=0)
    t_unit: Literal["absolute", "median"] = setting(
        "absolute", "unit of t_norm: absolute, or the cohort's median norm"
    )
    customise: bool = setting(
        True, "send each client its own mixture; else send all clients the reference model"
    )
    calibrate: bool = setting(
        True, "compare and judge updates as seen from the reference model; else as they were sent"
    )
    detect: bool = setting(True, "ban by t_norm")
    personalise: bool = setting(
        True, "train a private model too; else what a client trained is its own model"
    )
    similarity: Literal["all", "head"] = setting(
        "all", "cosines over all parameters, or over the head's (appendix A)"
    )
    reference: Literal["recovered", "customised"] = setting(
        "recovered", "mean of recovered models (Eq. 6) or of those sent (Algorithm 1)"
    )
    removal: Literal["excluded", "ignored"] = setting(
        "excluded", "banned clients are not drawn any more; or still drawn and left out"
    )
    variant: Literal["paper", "authors"] = setting(
        "paper", "authors: the released code's removal and uniform phi"
    )

    @model_validator(mode="after")
    def _above_the_median(self) -> FedCap:
        if self.t_unit == "median" and self.t_norm < 1:
            raise ValueError("t_norm below 1 median norm would ban half of any cohort; set 2, for example")
        return self

    @property
    def draws_banned(self) -> bool:
        return self.removal == "ignored"

    def without_server_optimizer(self) -> str:
        if not self.customise:
            return ""
        return "mixes a model for each client and moves none that all train; set method.customise = false"

    def detectors(self) -> tuple[Norm, ...]:
        return (Norm(threshold=self.t_norm, unit=self.t_unit),) if self.detect else ()
