"""The Flower ServerApp: drives the same experiment as the simulator, with a fleet of Flower nodes as its engine.

The run's settings (`[tool.flwr.app.config]` or `flwr run -c`): config, the experiment's TOML file; out, its run directory; deadline,
seconds that clients have for a request; join, seconds to wait for clients at the start. Every round is committed to `out`, so starting
again with the same `out` goes on where the last server stopped."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from holdfast.config import Config
from holdfast.core.errors import RunError
from holdfast.core.screen import FEDERATION_NORM_CAP, screen
from holdfast.core.types import ROOT, Exchange, Schema, Uplink
from holdfast.deploy import wire
from holdfast.deploy.node import expected, federated, fingerprint
from holdfast.deploy.post import Malformed, Post, read_client
from holdfast.engine.cell import Cell
from holdfast.engine.client import EVALUATE, schema_of
from holdfast.engine.simulator import Call, Simulator, nobody
from holdfast.session import Watch, resume, start

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    serve(grid, context.run_config)


def serve(grid: Grid, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Play the experiment to its end and return its result."""
    config, out = federated(str(settings["config"])), Path(str(settings["out"]))
    fleet = Fleet(Post(grid), config, float(settings["deadline"]), float(settings["join"]))
    watch = Watch(say=lambda line: log(INFO, line))
    if (out / "head.json").exists():
        return resume(out, watch, engine=fleet.with_simulator, config=config)[0]
    # The label names the run on the clients' disks for as long as it lives, so it must be no other run's.
    label = re.sub(r"[^A-Za-z0-9_=-]", "_", out.name)[:60] + "-" + secrets.token_hex(4)
    return start([(label, config)], out, watch, engine=fleet.with_simulator)[0]


class Fleet:
    """The engine whose clients are Flower nodes: one letter per client and exchange. The root pseudo-client is the server itself.

    Which node is which client is what the node says of itself, asked for when the node is first seen; issue 9 replaces this by
    enrolment keys."""

    def __init__(self, post: Post, config: Config, deadline: float, join: float):
        self.post, self.config, self.deadline, self.join = post, config, deadline, join
        self.clients = expected(config)
        self.claims: dict[int, int | None] = {}  # every node that was ever asked, and which client it says it is
        self.nodes: dict[int, int] = {}  # client to node, of those connected now
        self.simulator = Simulator({})

    def with_simulator(self, plans: Mapping[str, Any], device: torch.device) -> Fleet:
        """The session's way to make an engine: the plan and the device are the server's own, for the root pseudo-client."""
        self.simulator = Simulator(plans, device)
        end = time.monotonic() + self.join
        self._meet()
        while len(self.nodes) < self.clients and time.monotonic() < end:
            time.sleep(self.post.poll)
            self._meet()
        absent = sorted(set(range(self.clients)) - set(self.nodes))
        if not self.nodes:
            raise RunError(f"no client joined within {self.join:g} s; start SuperNodes with --node-config 'client-id=0 state-dir=...'")
        log(INFO, "%d clients are here%s", len(self.nodes), f", absent: {absent[:20]}" if absent else "")
        return self

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]:
        return [self._one(call.cell, call.exchange) for call in calls]

    def close(self) -> None:
        self.simulator.close()

    def _one(self, cell: Cell, exchange: Exchange) -> Uplink:
        people = exchange.to != ROOT
        up = self._from_clients(cell, exchange.only(people))
        if bool(people.all()):
            return up
        root = self.simulator.exchange([Call(cell, exchange.only(~people))])[0]
        return _joined([root, up])

    def _from_clients(self, cell: Cell, exchange: Exchange) -> Uplink:
        """Ask each client and check what comes back: a fault of the sender is a refusal, silence a missing row."""
        self._meet()
        schema, dtype = schema_of(cell.rule, exchange, cell.wire(), cell.measure), cell.network.dtype
        client = {self.nodes[c]: c for c in exchange.to.tolist() if c in self.nodes}
        header = self._header(cell, exchange)
        places = {c: place for place, c in enumerate(exchange.to.tolist())}
        letters = {node: wire.pack_exchange(exchange, places[c], header) for node, c in client.items()}
        mail = self.post.ask("evaluate" if exchange.task == EVALUATE else "train", letters, self.deadline)
        rows: list[Uplink] = []
        refused = {client[node]: reason for node, reason in mail.malformed.items()}
        for node, content in mail.answers.items():
            try:
                rows.append(Uplink(torch.tensor([client[node]]), wire.read_fields(content, schema, dtype)))
            except Malformed as error:
                refused[client[node]] = str(error)
        cap = FEDERATION_NORM_CAP if cell.norm_cap is None else cell.norm_cap
        rows.sort(key=lambda row: int(row.ids))
        up = _screened(_joined([nobody(schema, dtype), *rows]), schema, refused, exchange.task, cap)
        missing = {client[node]: reason for node, reason in mail.missing.items()}
        missing |= {c: "not connected" for c in exchange.to.tolist() if c not in self.nodes}
        self._tell(header, up, missing)
        return up

    def _header(self, cell: Cell, exchange: Exchange) -> wire.Header:
        """Rounds are committed one by one, so while a round is played the one before it is the committed one."""
        return wire.Header(
            run=cell.label, task=exchange.task, round=cell.round, step=exchange.step, rehearsal=exchange.rehearsal,
            committed=cell.round - 1, threads=torch.get_num_threads(),
            world=fingerprint(self.config, cell.federation.digest, cell.initial),
        )  # fmt: skip

    def _tell(self, header: wire.Header, up: Uplink, missing: Mapping[int, str]) -> None:
        where = f"round {header.round}, {header.task}"
        for what, clients in (("refused", up.refused), ("missing", missing)):
            for client, reason in sorted(clients.items()):
                log(WARNING, "%s: client %d %s: %s", where, client, what, reason)
        # the round stays uncommitted, so nothing is lost by stopping; a newcomer that makes no request is no reason to
        if missing and not len(up) and not up.refused and header.task != "request":
            first = min(missing)
            raise RunError(f"{where}: no client answered (client {first}: {missing[first]}); mend this and start again with the same out")
        log(INFO, "%s: %d answered, %d refused, %d missing", where, len(up), len(up.refused), len(missing))

    def _meet(self) -> None:
        """See who is connected, and ask nodes that were not seen before who they are. Of several nodes that claim to be one client the
        first counts, as long as it is connected."""
        online = set(self.post.grid.get_node_ids())
        strangers = sorted(online - set(self.claims))
        mail = self.post.ask("query", {node: RecordDict() for node in strangers}, self.deadline)
        self.claims |= {node: None for node in strangers}
        for node, content in mail.answers.items():
            try:
                self.claims[node] = read_client(content, self.clients)
            except Malformed as error:
                mail.malformed[node] = str(error)
        for reason in [*mail.malformed.values(), *mail.missing.values()]:
            log(WARNING, "a node is not enrolled: %s", reason)
        self.nodes = {}
        for node, client in self.claims.items():
            if node in online and client is not None:
                self.nodes.setdefault(client, node)


def _screened(up: Uplink, schema: Schema, refused: Mapping[int, str], task: str, norm_cap: float | None) -> Uplink:
    """The value checks. A measured loss may honestly be infinite, so of a measurement only what has bounds is screened, counts and metrics,
    which enter means; and what contradicts itself."""
    if task != EVALUATE:
        checked = screen(up, schema, norm_cap)
        return Uplink(checked.ids, checked.fields, {**refused, **checked.refused})
    bounded = {name: field for name, field in schema.items() if field.low is not None}
    checked = screen(Uplink(up.ids, {name: up[name] for name in bounded}), bounded)
    kept = up.only(torch.isin(up.ids, checked.ids))
    wrong = _contradictions(kept)
    kept = kept.only(~torch.isin(kept.ids, torch.tensor(list(wrong), dtype=torch.int64)))
    return Uplink(kept.ids, kept.fields, {**refused, **checked.refused, **wrong})


def _contradictions(up: Uplink) -> dict[int, str]:
    """Measurements that cannot be: more right answers than samples, parts of samples, a loss below 0 or NaN."""
    out: dict[int, str] = {}
    for name, value in up.fields.items():
        split, _, figure = name.partition("/")
        total = up[f"{split}/total"]
        kind = figure.rpartition("/")[2]
        if kind in ("total", "correct"):
            bad, why = (value > total) | (value != value.round()), "is no number of samples"
        elif kind == "loss":
            bad, why = ~(value >= 0), "is no loss"
        else:
            bad, why = (value >= 0) & (total == 0), "is of no samples"
        out |= {client: f"{name} {why}" for client in up.ids[bad].tolist()}
    return out


def _joined(parts: list[Uplink]) -> Uplink:
    """Rows one below the other; the parts stand in the order of their ids."""
    fields = {name: torch.cat([part[name] for part in parts]) for name in parts[0].fields}
    return Uplink(torch.cat([part.ids for part in parts]), fields, {c: why for part in parts for c, why in part.refused.items()})
