"""FedCOM. Lu, Liang, Zhang, Wang, Zou, Crowcroft: FedCOM: Efficient Personalized Federated Learning by
Finding Your Best Peers.

Ditto for clients that have plenty of one class and little of another: the update of the last layer shows the
server which clients are rich in a class (Algorithm 1), and a client starts its personal training from the
mean of its own model and those of the peers that were found (Eq. 2). A round has two barriers, because
matching needs all updates: `train` (w), match, `personalise` (v)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout, Slot, Wire
from holdfast.core.recorded_table import RecordedTable
from holdfast.core.registry import register, setting
from holdfast.core.types import Exchange, Field, Round, Schema, State, Uplink, Verdict
from holdfast.evaluation import metrics
from holdfast.local.augment import Augment
from holdfast.local.client import Local, Received
from holdfast.local.gradients import Tensors
from holdfast.local.losses import Batch
from holdfast.methods.base import MOST_SAMPLES, ClientRule, Fields, Method, ServerRule
from holdfast.methods.context import Context

NOT_WANTED, NO_PEER = -1, -2
"""In the table `matches`, where there is no peer's id: the client did not ask for this class, or no peer was
found."""


class FedComClient(ClientRule):
    """Train the received w and report which classes are wanted; then mix the peers' v into the own one and
    train it, pulled to w."""

    tasks = frozenset({"train", "personalise"})
    knows = frozenset({"target"})
    method: FedCom

    def trainings(self) -> Mapping[str, int]:
        return {"train/fit": 1, "personalise/fit": 1}

    def init(self, local: Local) -> State:
        return {"personal": local.initial, "anchor": local.initial}

    def schema(self, task: str, wire: Wire) -> Schema:
        if task == "personalise":
            return {"personal": Field("model", (wire.size,))}
        head = last_layer(wire.model)
        fields = {**super().schema(task, wire), "wanted": Field("score", head.shape[:1], low=0, high=1)}
        if self.method.signal == "gradient":
            fields["gradient"] = Field("feature", head.shape)
        if self.method.scale == "steps":
            fields["steps"] = Field("count", low=0, high=MOST_SAMPLES)
        return fields

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        fitted = local.fit(received.model)
        sent = local.report(fitted.model, received, fitted)
        sent["wanted"] = self.wanted(local).to(fitted.model.dtype)
        if self.method.signal == "gradient":
            sent["gradient"] = class_gradients(local, received.model)
        if self.method.scale == "steps":
            sent["steps"] = fitted.steps.to(fitted.model.dtype)
        return {
            **state,
            "anchor": received.model,
        }, sent  # w^t is kept: it need not be sent again for the second phase

    def personalise(
        self, local: Local, state: State, received: Received, extra: Fields
    ) -> tuple[State, Fields]:
        sent = torch.zeros_like(state["personal"])
        peers = torch.zeros(local.n, 1, dtype=sent.dtype, device=sent.device)
        for j in range(received.pick.shape[1]):
            there = (received.pick[:, j : j + 1] >= 0).to(sent.device)
            sent = sent + torch.where(there, received.models(j), 0.0)
            peers = peers + there
        start = (state["personal"] + sent) / (1 + peers)  # Eq. 2
        target = state["anchor"]
        if self.method.pull_to == "peer":
            target = torch.where(peers > 0, sent / peers.clamp(min=1), target)
        trained = self.pulled(local, start, target)
        return {**state, "personal": trained}, {"personal": trained}

    def pulled(self, local: Local, start: Tensor, target: Tensor) -> Tensor:
        """Eq. 3: s epochs of v <- v - eta (grad F_k(v) + lam (v - target)). The paper's rule has the length
        of v - w in place of it."""
        epochs: dict[str, Any] = (
            {} if self.method.personal_epochs is None else {"epochs": self.method.personal_epochs}
        )
        return local.fit(start, pull=(target, local.settings.lam), **epochs).model

    def wanted(self, local: Local) -> Tensor:
        """bool[n, classes]: the client's target class where the partition names one; else all classes of
        which it has few samples."""
        classes = last_layer(local.network.layout).shape[0]
        if local.samples.classes != classes:
            raise ConfigError(
                f"fedcom: the last layer has {classes} outputs, but the data has {local.samples.classes}"
                " classes"
            )
        labels = local.data.labels
        real = torch.arange(labels.shape[1], device=labels.device) < local.count.to(labels.device)[:, None]
        held = torch.zeros(local.n, classes, dtype=torch.int64, device=labels.device).scatter_add_(
            1, labels, real.long()
        )
        few = (held > 0) & (held < local.settings.threshold[:, None] * held.amax(1, keepdim=True))
        target = local.facts.get("target")
        if target is None or self.method.minority == "inferred":
            return few
        named = torch.arange(classes, device=labels.device) == target[:, None]
        return torch.where(target[:, None] >= 0, named, few)

    def finetune(self, local: Local, state: State, received: Received) -> State:
        """A client that was not asked has no peers either: Ditto's personal step."""
        return {**state, "personal": self.pulled(local, state["personal"], received.into(state["anchor"]))}

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return state["personal"]


def last_layer(layout: Layout) -> Slot:
    """The weight matrix of the linear layer that a network, or its head where it names one, ends with: a row
    per class. Its bias, if any, is not used."""
    parameters = [
        slot
        for slot in layout.slots
        if not slot.buffer and (not layout.head or slot.name.startswith(f"{layout.head}."))
    ]
    weights = [slot for slot in parameters[-2:] if len(slot.shape) == 2]
    if not weights or weights[-1] is not parameters[-1] and weights[-1].shape[:1] != parameters[-1].shape:
        raise ConfigError(
            "fedcom: clients are matched by the rows of a last linear layer, which this network does not"
            " have; choose another model"
        )
    return weights[-1]


def own_class(net: nn.Module, batch: Batch) -> Tensor:
    """The cross-entropy, as a function of the logit of the sample's own class only: row c of the last layer's
    gradient then comes from the samples of class c alone, and one backward pass gives all rows."""
    logits = net(batch.x)
    own = torch.arange(logits.shape[1], device=logits.device) == batch.y[:, None]
    return F.cross_entropy(torch.where(own, logits, logits.detach()), batch.y, reduction="none")


def class_gradients(local: Local, model: Tensor) -> Tensor:
    """[n, classes, channels]: row c is the gradient at w^t of the loss on the samples of class c, over all
    the client's samples."""
    head = last_layer(local.network.layout)
    at = model[:, head.start : head.stop]
    there = local.network.layout.under(head.name)
    summed = local.fit(
        model,
        purpose="gradient",
        loss=own_class,
        step=gathered,
        trainable=there,
        aux={head.name: at.reshape(-1, *head.shape)},
        epochs=1,
        lr=1.0,
        augment=Augment(),
        drop_last=False,
    )
    moved = (at - summed.model[:, head.start : head.stop]) / local.count.clamp(min=1).to(model)[:, None]
    return moved.reshape(-1, *head.shape)


def gathered(
    gradient: Callable[[Tensors, Batch], Tensors], params: Tensors, batch: Batch, lr: Tensor
) -> Tensors:
    """Not a step: the gradient is taken at the layer as it was (`aux`), batch by batch, and added up in the
    layer's place."""
    found = gradient({**params, **batch.aux}, batch)
    return {name: params[name] - lr * batch.mask.sum() * found[name] for name in batch.aux}


class FedComServer(ServerRule):
    """Average w, match, and send personal models to peers. Remembers the last signal and the last personal
    model of every client."""

    method: FedCom

    def init(self, ctx: Context) -> State:
        head, no_ids = last_layer(ctx.layout), torch.zeros(0, dtype=torch.int64)
        state = {
            "model": ctx.initial,
            "personal/ids": no_ids,
            "personal/rows": ctx.initial.new_zeros(0, ctx.wire.size),
        }
        return state | {
            "signal/ids": no_ids,
            "signal/rows": torch.zeros(0, *head.shape, dtype=ctx.initial.dtype),
        }

    def round(self, state: State, ctx: Context) -> Round:
        model = state["model"]
        up = yield ctx.ask("train", model)
        state, passed, verdict = yield from ctx.judge(state, up, model)
        merged = yield from ctx.merge(state, passed, model, verdict)
        state, verdict = merged.state | {"model": merged.model}, merged.verdict
        asking = up.only(up.is_client & ~_among(up.ids, verdict.banned))
        with ctx.timer.part("match"):
            state, matches = self._matched(
                state, ctx, asking, passed, {*up.refused, *verdict.rejected}, set(verdict.banned)
            )
        for part in torch.arange(len(asking)).split(
            1 if self.method.order == "sequential" else max(1, len(asking))
        ):
            back = yield to_personalise(state, asking.ids[part], matches[part])
            back = back.only(
                ~_among(back.ids, verdict.rejected)
            )  # a suspect model is not sent on in the next round either
            state = remember(state, "personal", back.ids, back["personal"])
        table = torch.full((len(verdict.ids), matches.shape[1]), NOT_WANTED, dtype=torch.int64)
        table[torch.isin(verdict.ids, asking.ids)] = matches
        return state, replace(verdict, tables={**verdict.tables, "matches": table})

    def _matched(
        self, state: State, ctx: Context, asking: Uplink, passed: Uplink, not_now: set[int], banned: set[int]
    ) -> tuple[State, Tensor]:
        """The matches [n, classes] of clients that ask, among all that are remembered, except rejected
        ones."""
        for name in ("signal", "personal"):
            state = forget(state, name, banned)
        if not self.method.matching:
            return state, torch.full(asking["wanted"].shape, NOT_WANTED, dtype=torch.int64)
        good = passed.clients()
        state = remember(state, "signal", good.ids, self._signal(ctx, good))
        ids = state["signal/ids"]
        usable = ~_among(ids, not_now)
        found = match(
            self._signal(ctx, asking),
            asking.ids,
            asking["wanted"] > 0.5,
            state["signal/rows"][usable],
            ids[usable],
            self.method.channels,
        )
        return state, found

    def _signal(self, ctx: Context, up: Uplink) -> Tensor:
        """g_k = W^t - W_k, or the gradient that the client sent; on the chosen scale and on the host, where
        matches are found: it is small."""
        head = last_layer(ctx.layout)
        g = (
            up["gradient"]
            if self.method.signal == "gradient"
            else -up["update"][:, head.start : head.stop].reshape(-1, *head.shape).cpu()
        )
        if self.method.scale == "none":
            return g
        by = g.flatten(1).norm(dim=1) if self.method.scale == "norm" else up["steps"].to(g)
        return g / torch.where(by > 0, by, 1.0)[:, None, None]


def match(own: Tensor, asking: Tensor, wanted: Tensor, signals: Tensor, ids: Tensor, channels: int) -> Tensor:
    """Algorithm 1 for all clients that ask: [n, classes], for each wanted class the id of the peer, else
    NOT_WANTED or NO_PEER.

    The smallest entries of the client's own row decide which channels matter; the peer is the other client
    that increased these most (line 6). Equal sums: the lowest id. Where all rows are the same, no client has
    learnt the class; nor has a client with only zeros."""
    found = torch.where(wanted, NO_PEER, NOT_WANTED)
    for k, c in wanted.nonzero().tolist():
        others = (ids != asking[k]) & signals[:, c].any(1)
        rows, row = signals[others, c].double(), own[k, c]
        if not len(rows) or bool((rows == row.double()).all()):
            continue
        important = row.argsort(stable=True)[:channels]  # line 5
        sums = rows[:, important].sum(1).nan_to_num(nan=torch.inf)
        found[k, c] = ids[others][sums.argmin()]
    return found


def to_personalise(state: State, to: Tensor, matches: Tensor) -> Exchange:
    """The request to personalise: to each client the personal models of its peers, as far as the server has
    them, each once."""
    row_of = {client: row for row, client in enumerate(state["personal/ids"].tolist())}
    peers = [sorted({peer for peer in row if peer in row_of}) for row in matches.tolist()]
    place = {peer: place for place, peer in enumerate(sorted({peer for own in peers for peer in own}))}
    pick = torch.full((len(to), max(map(len, peers), default=0)), -1, dtype=torch.int64)
    for i, own in enumerate(peers):
        pick[i, : len(own)] = torch.tensor([place[peer] for peer in own], dtype=torch.int64)
    return Exchange("personalise", to, state["personal/rows"][[row_of[peer] for peer in place]], pick)


def remember(state: State, name: str, ids: Tensor, rows: Tensor) -> State:
    """The state with these clients' rows in a table, which is sorted by id, in place of those they had."""
    state = forget(state, name, set(ids.tolist()))
    ids, rows = torch.cat([state[f"{name}/ids"], ids]), torch.cat([state[f"{name}/rows"], rows])
    order = ids.argsort()
    return state | {f"{name}/ids": ids[order], f"{name}/rows": rows[order]}


def forget(state: State, name: str, clients: set[int]) -> State:
    kept = ~_among(state[f"{name}/ids"], clients)
    return state | {f"{name}/ids": state[f"{name}/ids"][kept], f"{name}/rows": state[f"{name}/rows"][kept]}


def _among(ids: Tensor, clients: Iterable[int]) -> Tensor:
    return torch.isin(ids, torch.tensor(sorted(clients), dtype=torch.int64))


@register(
    "method",
    "fedcom",
    paper="Lu et al., FedCOM: Efficient Personalized Federated Learning by Finding Your Best Peers",
)
class FedCom(Method):
    """Ditto whose clients first mix in the personal model of a peer that is rich in the class they have
    little of.

    The server finds the peer by the last layer's update. A client's target classes are those that the
    partition names (`target`, as complementary-pairs does); where it names none, all classes the client has
    less than `threshold` times its largest of."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "the model, then personal models of peers",
        "what a client keeps": "a second model, mixed with those of its peers",
        "personal model": "that second model",
        "what that says, beyond the update itself": (
            "`wanted` are class ids: which classes this client has little of; `personal` is the "
            "whole personal model, which a peer is handed"
        ),
    }
    Client = FedComClient
    Server = FedComServer
    models = ("global", "personal")
    deploys = "personal"
    tables = {
        "matches": RecordedTable(
            "whose model each client was given for a class (-2: no peer was found)", kind="classes"
        )
    }
    search = {
        "lam": (0.01, 0.1, 1.0),
        "channels": (1, 5, 20),
    }  # x as in Table 2; of lam the paper has 0.01 only
    lam: float = setting(0.01, "strength of the pull of the personal model", ge=0)
    channels: int = setting(
        5, "x: how many entries of the class's row are compared; all where there are fewer", ge=1
    )
    matching: bool = setting(True, "look for peers; false: Ditto, trained first w, then v")
    minority: Literal["given", "inferred"] = setting(
        "given", "given: the class that the partition calls a client's target; else inferred"
    )
    threshold: float = setting(
        0.5, "inferred: a class is wanted if the client has less than this share of its largest", gt=0, le=1
    )
    signal: Literal["update", "gradient"] = setting(
        "update", "what is compared: W^t - W_k, or the gradient of the class's loss at w^t"
    )
    scale: Literal["none", "norm", "steps"] = setting(
        "none", "divide a client's signal by nothing, its length or its local steps"
    )
    order: Literal["jacobi", "sequential"] = setting(
        "jacobi", "peers' models of the last round; or the newest, one client at a time"
    )
    pull_to: Literal["global", "peer"] = setting(
        "global", "target of the pull: the received w (Eq. 3), or to the mean of the peers' models"
    )
    personal_epochs: int | None = setting(
        None, "s, in epochs; none: as many as train.local_epochs (or local_steps)", ge=0
    )

    def round_figures(self, verdict: Verdict, facts: Mapping[str, Tensor], benign: Tensor) -> metrics.Figures:
        """How many matches name the true partner, where the partition knows it (Table 2)."""
        if "matches" not in verdict.tables:
            return {}
        return metrics.of_matches(verdict.tables["matches"], verdict.ids, facts, benign)
