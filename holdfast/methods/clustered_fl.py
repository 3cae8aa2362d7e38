"""Clustered federated learning. Sattler, Müller, Samek: Clustered Federated Learning: Model-Agnostic
Distributed Multi-Task Optimization under Privacy Constraints, IEEE TNNLS 2020.

Clients whose data fit one model stay together; FedAvg inside each cluster. When a cluster's updates cancel,
so that their mean has a norm below eps1 while some client's norm is still above eps2, no single model fits
all of them: the cluster is cut in two by the cosines of the updates, and both parts go on by themselves from
the model they had (the recursive bi-partitioning). Lengths depend on the network and the local training, so
both are measured by the longest step that the cluster's model has taken. The clusters are the leaves of a
tree that remembers every cut; a client that was away walks down from its node, by the direction of its own
update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.bipartition import at_odds, bipartition
from holdfast.aggregators.geometry import cosines, norms
from holdfast.core.recorded_table import RecordedTable
from holdfast.core.registry import register, setting
from holdfast.core.types import Exchange, Round, State, Steps, Uplink, Verdict
from holdfast.methods.base import Method, ServerRule
from holdfast.methods.context import Context, Merged
from holdfast.methods.fedavg import FedAvgClient

PAPER = (
    "Sattler et al., Clustered Federated Learning: Model-Agnostic Distributed Multi-Task Optimization, IEEE"
    " TNNLS 2020"
)
_TREE = ("models", "children", "directions", "longest", "ids", "at")


@dataclass
class Tree:
    """`models` [nodes, size]: of a leaf its cluster's model, of an inner node the last that its clients had
    in common. `children` [nodes, 2]: -1 for leaves. `directions` [nodes, p]: where the updates pointed whose
    clients made this node. `longest` [nodes]: the length of the longest aggregated update there was. `at[i]`
    is the node of client `ids[i]`. `memory` is what the aggregator, the detectors and the server's
    optimiser remember of each leaf."""

    models: Tensor
    children: Tensor
    directions: Tensor
    longest: Tensor
    ids: Tensor
    at: Tensor
    memory: dict[int, State]

    @classmethod
    def of(cls, state: State) -> Tree:
        """Before the first round, the memories still lie beside the tree, as the run put them there: they are
        the root's."""
        memory: dict[int, State] = {}
        for name, value in state.items():
            if name not in _TREE:
                node, inner = name.split("/", 1) if name.startswith("node") else ("node0", name)
                memory.setdefault(int(node.removeprefix("node")), {})[inner] = value
        return cls(**{name: state[name] for name in _TREE}, memory=memory)

    def state(self) -> State:
        memories = {
            f"node{node}/{name}": value for node, own in self.memory.items() for name, value in own.items()
        }
        return {**{name: getattr(self, name) for name in _TREE}, **memories}

    def places(self, ids: Tensor) -> Tensor:
        """The node of each client; the root for unknown clients."""
        known = torch.isin(ids, self.ids)
        out = torch.zeros_like(ids)
        out[known] = self.at[torch.searchsorted(self.ids, ids[known])]
        return out

    def put(self, ids: Tensor, node: int | Tensor) -> None:
        """Clients to a node, or each to its own."""
        stays = ~torch.isin(self.ids, ids)
        every, order = torch.cat([self.ids[stays], ids]).sort()
        self.ids, self.at = every, torch.cat([self.at[stays], torch.as_tensor(node).expand(len(ids))])[order]

    def reached(self, node: int, length: float) -> None:
        """A step of this length."""
        self.longest = self.longest.clone()
        self.longest[node] = max(float(self.longest[node]), length)

    def grow(self, node: int, update: Tensor, part: Tensor) -> list[int]:
        """Two children under a leaf, for the updates in `part` and the others; they share its model and
        memory."""
        first = len(self.models)
        way = update / norms(update)[:, None].clamp(min=1e-30).to(
            update.dtype
        )  # a zero update has no direction
        self.models = torch.cat([self.models, self.models[[node, node]]])
        self.directions = torch.cat(
            [self.directions, torch.stack([way[chosen].mean(0) for chosen in (part, ~part)])]
        )
        self.longest = torch.cat([self.longest, torch.zeros(2, dtype=torch.float64)])
        self.children = torch.cat([self.children, torch.full((2, 2), -1)])
        self.children[node] = torch.tensor([first, first + 1])
        self.memory[first] = self.memory[first + 1] = self.memory.pop(node, {})
        return [first, first + 1]


class ClusteredServer(ServerRule):
    """FedAvg in each cluster, and cuts."""

    method: ClusteredFl

    def init(self, ctx: Context) -> State:
        no_ids, none = torch.zeros(0, dtype=torch.int64), ctx.initial.new_zeros(1, ctx.wire.parameters)
        still = torch.zeros(1, dtype=torch.float64)
        return Tree(
            ctx.initial[None].clone(), torch.full((1, 2), -1), none, still, no_ids, no_ids, {}
        ).state()

    def round(self, state: State, ctx: Context) -> Round:
        tree = Tree.of(state)
        yield from self._walk_down(tree, ctx)
        places, done = tree.places(ctx.cohort), []
        for leaf in places.unique().tolist():
            if bool(tree.children[leaf, 0] < 0):  # else they did not answer
                done.append((yield from self._train(tree, leaf, ctx.cohort[places == leaf], ctx)))
        return tree.state(), _together(done, ctx)

    def deliver(self, state: State, ctx: Context, ids: Tensor) -> Steps[Exchange]:
        yield from ()
        return Exchange("deliver", ids, state["models"], Tree.of(state).places(ids)[:, None])

    def _walk_down(self, tree: Tree, ctx: Context) -> Steps[None]:
        """Clients of the cohort at a node that was cut without them train its model and go where their update
        points, down to a leaf."""
        clients = ctx.cohort
        while True:
            places = tree.places(clients)
            inner = tree.children[places, 0] >= 0
            clients, places = clients[inner], places[inner]
            if not len(clients):
                return
            up = yield Exchange("train", clients, tree.models, places[:, None])
            clients = up.ids  # a client that does not answer stays where it is
            if len(clients):
                below = tree.children[tree.places(clients)]
                tree.put(
                    clients, below.gather(1, _nearer(up["update"], tree.directions[below])[:, None])[:, 0]
                )

    def _train(self, tree: Tree, leaf: int, members: Tensor, ctx: Context) -> Steps[Verdict]:
        """One cluster's round. A cut comes before averaging, so that each part moves by its own updates."""
        model = tree.models[leaf]
        up = yield ctx.ask("train", model, members)
        tree.memory[leaf], up, verdict = yield from ctx.judge(tree.memory.get(leaf, {}), up, model)
        clients = up.clients()
        parts, leaves = [up], [leaf]
        mean = _mean_length(clients, ctx)
        longest = float(norms(clients["update"]).max()) if len(clients) else torch.nan
        with ctx.timer.part("cluster"):
            part = self._cut(clients, max(mean, float(tree.longest[leaf])), ctx) if len(clients) > 2 else None
        if part is not None:
            leaves = tree.grow(leaf, clients["update"], part)
            sides = [clients.ids[part], clients.ids[~part]]
            parts = [up.of(side) for side in sides]
        moved = []
        for node, replies in zip(leaves, parts, strict=True):
            tree.put(replies.clients().ids, node)
            merged = yield from ctx.merge(tree.memory.get(node, {}), replies, model, verdict)
            tree.reached(node, _step(merged, model, ctx))
            tree.models, tree.memory[node] = tree.models.clone(), merged.state
            tree.models[node] = merged.model
            moved.append(merged)
        numbers = {
            "mean_norm": mean,
            "max_norm": longest,
            "split": float(len(leaves) > 1),
            "cluster": float(leaf),
        }
        told = {name: torch.tensor([value], dtype=torch.float64) for name, value in numbers.items()}
        return replace(_of_both(moved), tables={**verdict.tables, **told})

    def _cut(self, clients: Uplink, longest: float, ctx: Context) -> Tensor | None:
        """bool[n], one of the two parts; None where they still move together, no update is long, or the two
        parts are too similar. A client with a zero update does not count, and is in the first part, as in
        `_nearer`."""
        method, update = self.method, clients["update"]
        unit, moved = longest if method.relative else 1.0, (norms(clients["update"]) > 0).cpu()
        if int(moved.sum()) < 2 or not at_odds(
            update, ctx.priors(clients), unit * method.eps1, unit * method.eps2
        ):
            return None
        part = torch.ones_like(moved)
        part[moved] = bipartition(update[moved], clients.ids[moved]).cpu()
        return part if float(cosines(update)[part & moved][:, ~part].max()) <= method.across else None


def _mean_length(clients: Uplink, ctx: Context) -> float:
    """How long the mean of the updates is."""
    if not len(clients):
        return torch.nan
    return float(norms((ctx.priors(clients).to(clients["update"]) @ clients["update"])[None]))


def _step(merged: Merged, model: Tensor, ctx: Context) -> float:
    """How long the aggregated update was; by the mean that is the mean's length, and by a robust rule no
    attacker makes it long."""
    if ctx.server is not None:  # whose step is of another length
        return 0.0 if merged.aggregate is None else float(norms(merged.aggregate[None]))
    return float(norms(ctx.wire.split((merged.model - model)[None])[0])) / ctx.server_lr


def _nearer(update: Tensor, directions: Tensor) -> Tensor:
    """Which of two directions [n, 2, p] each update is closer to, by the cosine; the first of equal ones."""
    lengths = directions.norm(dim=2).clamp(min=torch.finfo(update.dtype).tiny)
    cosine = (directions @ update[:, :, None])[:, :, 0] / lengths
    return (cosine[:, 1] > cosine[:, 0]).long().cpu()


def _of_both(moved: list[Merged]) -> Verdict:
    """The verdict on a cluster that may have been cut: a client in one part has no weight in the other."""
    first = moved[0].verdict
    weights = torch.stack([m.verdict.weights for m in moved if m.verdict.weights is not None]).sum(0)
    notes = tuple(dict.fromkeys(note for m in moved for note in m.verdict.notes))
    return replace(first, weights=weights, notes=notes, fallback=any(m.verdict.fallback for m in moved))


def _together(verdicts: list[Verdict], ctx: Context) -> Verdict:
    """All clusters' verdicts as one, by client; other tables end to end, cluster after cluster."""
    if not verdicts:
        nothing = torch.zeros(0, dtype=torch.float64)
        return Verdict(
            ctx.cohort[:0],
            nothing,
            tables={"norms": nothing},
            notes=("no client answered: the models stay as they were",),
        )
    ids, order = torch.cat([v.ids for v in verdicts]).sort()
    weights = torch.cat([v.weights for v in verdicts if v.weights is not None])[order]

    def joined(of: str, name: str) -> Tensor:
        return torch.cat(
            [
                getattr(v, of).get(name, torch.full((len(v.ids),), torch.nan, dtype=torch.float64))
                for v in verdicts
            ]
        )

    scores = {
        name: joined("scores", name)[order]
        for name in dict.fromkeys(name for v in verdicts for name in v.scores)
    }
    tables = {"norms": joined("tables", "norms")[order]}
    for name in ("mean_norm", "max_norm", "split", "cluster"):
        tables[name] = torch.cat([v.tables[name] for v in verdicts])
    for verdict in verdicts:  # a detector's own tables, whatever their shape
        place = f"/node{int(verdict.tables['cluster'])}" if len(verdicts) > 1 else ""
        tables |= {name + place: value for name, value in verdict.tables.items() if name not in tables}
    banned, rejected = (
        {client: why for v in verdicts for client, why in getattr(v, field).items()}
        for field in ("banned", "rejected")
    )
    return Verdict(
        ids,
        weights,
        scores,
        banned,
        rejected,
        tables,
        tuple(dict.fromkeys(note for v in verdicts for note in v.notes)),
        any(v.fallback for v in verdicts),
    )


@register("method", "clustered-fl", paper=PAPER)
class ClusteredFl(Method):
    """One model for each group of clients that agree: clusters are cut in two when their members' updates
    cancel.

    `eps1` and `eps2` are shares of the longest aggregated update that the cluster has had, so that one
    setting suits networks and recipes of any scale: while clients come closer together, the mean is long;
    when they have converged, all updates are short, and the cluster stays whole; where the mean is short and
    members' updates are not, they disagree. A part that was cut off is measured by its own updates. And no
    two clients on different sides of a cut may point the same way (`across`), or noise would cut off clients
    that differ a little. With `relative = false` and `across = 1` the lengths are taken as they are and every
    cut is made, as in the authors' notebook, which has 0.4 and 1.6 (and waits for 20 rounds): small networks
    never get that far. Every round records each cluster's `mean_norm` and `max_norm` (verdict/tables).
    Everything travels, once; a client that was away when its cluster was cut trains the last common model
    first, once for each cut, to find its place, and until then that is its model. eps1 = 0 never cuts:
    FedAvg. The aggregator, the detectors and a server optimiser work inside each cluster; both parts
    of a cluster that is cut go on with what these remember."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what travels": "the model of the client's cluster",
        "what a client keeps": "nothing",
        "personal model": "the model of its cluster",
        "what that says, beyond the update itself": "the server keeps who is like whom",
    }
    Client = FedAvgClient
    Server = ClusteredServer
    tables = {
        "mean_norm": RecordedTable("length of each cluster's mean update", kind="number"),
        "max_norm": RecordedTable("length of each cluster's longest update", kind="number"),
        "split": RecordedTable("1 for each cluster that was cut in two", kind="number"),
        "cluster": RecordedTable("the node of each cluster in the tree", kind="number"),
    }
    models = ("customised",)
    deploys = "customised"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"eps1": (0.3, 0.5, 0.7), "across": (0.0, 1.0)}
    eps1: float = setting(
        0.5, "cut only when the norm of a cluster's mean update is below this (0: never)", ge=0
    )
    eps2: float = setting(0.8, "cut only when the norm of a member's update is above this", ge=0)
    relative: bool = setting(
        True, "whether both are shares of the longest aggregated update of the cluster so far; else lengths"
    )
    across: float = setting(
        0.0,
        "cut only when no cosine of two updates across the cut is above this (1: any cut is made)",
        ge=-1,
        le=1,
    )
