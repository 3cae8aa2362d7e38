"""The engine whose clients are Flower nodes: every exchange becomes one request to each client, every reply a
row.

A reply with a fault of its sender is refused, and is a strike. A client that does not answer counts as absent
in this exchange. When fewer answer than the quorum, those that are missing are asked again as they come back,
until wait_settings is over: then the run stops with nothing lost, and is continued by starting it again."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.common import log

from holdfast.core.errors import RunError
from holdfast.core.screening import FEDERATION_NORM_CAP, NOT_FINITE, screen
from holdfast.core.types import ROOT, Exchange, Schema, Uplink
from holdfast.deploy import wire
from holdfast.deploy.admission import Admission
from holdfast.deploy.deadlines import Deadlines
from holdfast.deploy.envelope import Subject
from holdfast.deploy.messaging import Messaging, Replies, Request
from holdfast.deploy.node import declared_in, expected, fingerprint
from holdfast.engine.client_task import EVALUATE, schema_of
from holdfast.engine.run_context import RunContext
from holdfast.engine.simulator import Call, Simulator, empty_uplink
from holdfast.experiment.config import Config
from holdfast.local.losses import CrossEntropy


@dataclass(frozen=True)
class WaitSettings:
    """How long a federation waits, and for how many."""

    deadline: float = 120.0
    """Seconds that a client has for a request."""
    join: float = 120.0
    """Seconds to wait for all clients at the start."""
    quorum: float = 0.0
    """The share of the clients asked that must answer; at least one must."""
    wait: float = 0.0
    """Seconds to wait for a quorum before the run stops."""
    retry: float = 1.0
    """Seconds between two requests to missing clients while it waits for a quorum."""


class FlowerEngine:
    """Answers exchanges by asking nodes. The server itself is the root pseudo-client."""

    def __init__(
        self, messaging: Messaging, config: Config, admission: Admission, wait_settings: WaitSettings
    ):
        self.messaging, self.config, self.admission, self.wait_settings = (
            messaging,
            config,
            admission,
            wait_settings,
        )
        self.clients, self.declared = expected(config), declared_in(config)
        self.simulator = Simulator({})
        self.deadlines = Deadlines(wait_settings.deadline)
        self.deadlines.remember(admission.ledger_entries())

    def with_simulator(self, plans: Mapping[str, Any], device: torch.device) -> FlowerEngine:
        """Prepare the engine for a session and wait for clients. Plans and device are the server's own, for
        the root pseudo-client."""
        self.simulator = Simulator(plans, device)
        end = time.monotonic() + self.wait_settings.join
        here = self.admission.connected()
        while len(here) < self.admission.admitted_count(self.clients) and time.monotonic() < end:
            time.sleep(self.messaging.poll)
            here = self.admission.connected()
        absent = sorted(set(range(self.clients)) - set(here))
        if not here:
            raise RunError(f"no client joined within {self.wait_settings.join:g} s; {self.admission.hint}")
        log(INFO, "%d clients have joined%s", len(here), f", absent: {absent[:20]}" if absent else "")
        return self

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]:
        return [self._one(call.run_context, call.exchange) for call in calls]

    def close(self) -> None:
        self.simulator.close()

    def _one(self, run_context: RunContext, exchange: Exchange) -> Uplink:
        to_clients = exchange.to != ROOT
        if len(exchange.to) and not bool(to_clients.any()):  # the server asks itself: no node is waited for
            return self.simulator.exchange([Call(run_context, exchange)])[0]
        up = self._from_clients(run_context, exchange.only(to_clients))
        if bool(to_clients.all()):
            return up
        root = self.simulator.exchange([Call(run_context, exchange.only(~to_clients))])[0]
        return _joined([root, up])

    def _from_clients(self, run_context: RunContext, exchange: Exchange) -> Uplink:
        """Ask the clients and screen what they answer."""
        if not self.admission.admitted_count(self.clients):  # further rounds would have no clients
            raise RunError(
                f"round {run_context.round}, {exchange.task}: all clients have left or are banned; enrol one"
            )
        exchange = exchange.only(
            torch.tensor([self.admission.admits(c) for c in exchange.to.tolist()], dtype=torch.bool)
        )
        schema = self._counted(
            schema_of(run_context.rule, exchange, run_context.wire(), run_context.measure), run_context
        )
        dtype, header = run_context.network.dtype, self._header(run_context, exchange)
        optional = exchange.task in run_context.rule.optional
        rows, refused, missing = self._ask(exchange, header, schema, dtype, optional)
        cap = FEDERATION_NORM_CAP if run_context.norm_cap is None else run_context.norm_cap
        # A client may have been banned while the server waited.
        in_order = [rows[c] for c in sorted(rows) if self.admission.admits(c)]
        up = _screened(_joined([empty_uplink(schema, dtype), *in_order]), schema, refused, exchange.task, cap)
        if exchange.task == EVALUATE:
            endless = _endless(up)
            up, missing = _without(up, endless), missing | endless
        self._report(header, up, missing)
        return up

    def _ask(
        self, exchange: Exchange, header: wire.Header, schema: Schema, dtype: torch.dtype, optional: bool
    ) -> tuple[dict[int, Uplink], dict[int, str], dict[int, str]]:
        """Ask until a quorum has answered or the waiting time is over. Return the rows of those who answered,
        and the reasons for refused and missing ones. No quorum is needed where answers are optional."""
        places = {c: place for place, c in enumerate(exchange.to.tolist())}
        rows: dict[int, Uplink] = {}
        refused: dict[int, str] = {}
        end: float | None = None  # of the waiting time, which begins when too few have answered
        while True:
            here = self.admission.connected()
            # clients may leave or be banned meanwhile
            wanted = [c for c in places if self.admission.admits(c)]
            open_ones = [c for c in wanted if c not in rows and c not in refused]
            # While it waits for a quorum, paused clients are asked too.
            resting = self._resting(open_ones, len(wanted), header.round) if end is None else {}
            asked = {here[c]: c for c in open_ones if c in here and c not in resting}
            missing = {c: "not connected" for c in open_ones if c not in here} | resting
            requests = {
                node: self._request(exchange, places[c], header, schema, dtype) for node, c in asked.items()
            }
            replies = self.messaging.ask("evaluate" if exchange.task == EVALUATE else "train", requests)
            self._time(asked, replies, header)
            missing |= {asked[node]: reason for node, reason in replies.missing.items()}
            refused |= {asked[node]: reason for node, reason in replies.malformed.items()}
            rows |= {
                asked[node]: Uplink(torch.tensor([asked[node]]), fields)
                for node, fields in replies.answers.items()
            }
            missing = {c: reason for c, reason in missing.items() if self.admission.admits(c)}
            answered = len([c for c in wanted if c in rows or c in refused])
            if optional or self._enough(len(wanted), answered, missing):
                return rows, refused, missing
            if end is None:
                end = time.monotonic() + self.wait_settings.wait
                if self.wait_settings.wait > 0:
                    self._report_wait(header, len(wanted), answered, missing)
            if time.monotonic() >= end:
                self._give_up(header, len(wanted), answered, missing)
            time.sleep(max(self.wait_settings.retry, self.messaging.poll))

    def _report_wait(
        self, header: wire.Header, wanted: int, answered: int, missing: Mapping[int, str]
    ) -> None:
        where = f"round {header.round}, {header.task}"
        log(WARNING, "%s: waiting for a quorum; %d of %d have answered", where, answered, wanted)
        self.admission.record_wait(header, answered, missing, self.wait_settings.wait)

    def _request(
        self, exchange: Exchange, place: int, header: wire.Header, schema: Schema, dtype: torch.dtype
    ) -> Request:
        client = int(exchange.to[place])
        return Request(
            wire.pack_exchange(exchange, place, header),
            lambda content: wire.read_fields(content, schema, dtype),
            wire.limits_of(schema, dtype),
            self.deadlines.of(client, header.task),
            Subject(header.run, header.round, header.step, header.task, client),
            self.admission.key_of(client),
        )

    def _resting(self, clients: Sequence[int], wanted: int, round: int) -> dict[int, str]:
        """Return the paused clients, which are not asked. If the quorum cannot be reached without them, none
        is left out."""
        resting = {
            c: f"paused until round {self.deadlines.until[c]}"
            for c in clients
            if self.deadlines.is_paused(c, round)
        }
        return (
            resting if wanted - len(resting) >= max(1, math.ceil(self.wait_settings.quorum * wanted)) else {}
        )

    def _time(self, asked: Mapping[int, int], replies: Replies, header: wire.Header) -> None:
        """Count who has answered and who missed the deadline."""
        for node, client in asked.items():
            if node in replies.answers:
                self.deadlines.answered(client, header.task, replies.seconds[node])
            elif node in replies.late:
                until = self.deadlines.missed(client, header.round)
                if until is not None:
                    self.admission.record_pause(header, client, until, self.deadlines.pauses[client])

    def _counted(self, schema: Schema, run_context: RunContext) -> Schema:
        """Bound the sample counts of a schema. A client's count is its weight, in the model and in the
        figures, so it cannot exceed what was declared, or the largest share assigned. The usual loss, with
        what our methods add to it, is never below 0; a loss or method of a plug-in may be."""
        federation, common = run_context.federation, run_context.measure.test == "global"
        if self.declared is None:
            least, shares = (
                0,
                {
                    "train": federation.train,
                    "validation": federation.validation,
                    "test": federation.global_test if common else federation.test,
                },
            )
            most = {split: int(table.counts.max()) for split, table in shares.items()}
        else:
            least, most = (
                self.declared.least,
                dict.fromkeys(("train", "validation", "test"), self.declared.most),
            )
        bounds = {"count": (least, most["train"])}  # in all
        bounds |= {name: (0, most["train"]) for name, field in schema.items() if field.of_samples}
        bounds |= {f"{split}/total": (0, most[split]) for split in ("validation", "test")}
        counted = {
            name: replace(field, low=bounds[name][0], high=bounds[name][1]) if name in bounds else field
            for name, field in schema.items()
        }
        if (
            "loss" in schema
            and isinstance(run_context.recipe.loss, CrossEntropy)
            and type(run_context.method).__module__.startswith("holdfast.")
        ):
            counted["loss"] = replace(schema["loss"], low=0)
        return counted

    def _enough(self, wanted: int, answered: int, missing: Mapping[int, str]) -> bool:
        return not missing or answered >= max(1, math.ceil(self.wait_settings.quorum * wanted))

    def _give_up(self, header: wire.Header, wanted: int, answered: int, missing: Mapping[int, str]) -> None:
        """Stop the run. The round stays uncommitted, so nothing is lost."""
        first = min(missing)
        why = f"client {first}: {missing[first]}"
        waited = f", and {self.wait_settings.wait:g} s of waiting are over" if self.wait_settings.wait else ""
        few = (
            "no client answered"
            if not answered
            else f"{answered} of {wanted} clients answered, fewer than the quorum"
        )
        raise RunError(f"round {header.round}, {header.task}: {few} ({why}){waited}")

    def _header(self, run_context: RunContext, exchange: Exchange) -> wire.Header:
        """Return the header of all requests of an exchange. During a round the one before it is the committed
        one."""
        return wire.Header(
            run=run_context.label,
            task=exchange.task,
            round=run_context.round,
            step=exchange.step,
            discard_state=exchange.discard_state,
            committed=run_context.round - 1,
            threads=torch.get_num_threads(),
            world=fingerprint(self.config, run_context.federation.digest, run_context.initial),
        )

    def _report(self, header: wire.Header, up: Uplink, missing: Mapping[int, str]) -> None:
        where = f"round {header.round}, {header.task}"
        for what, clients in (("refused", up.refused), ("missing", missing)):
            for client, reason in sorted(clients.items()):
                log(WARNING, "%s: client %d %s: %s", where, client, what, reason)
        self.admission.record_exchange(header, up.refused, missing)
        log(INFO, "%s: %d answered, %d refused, %d missing", where, len(up), len(up.refused), len(missing))


def _screened(
    up: Uplink, schema: Schema, refused: Mapping[int, str], task: str, norm_cap: float | None
) -> Uplink:
    """Check the values. A measured loss may honestly be infinite, so in a measurement only fields with bounds
    are screened (counts and metrics, which enter means), and contradictions. Whole counts are checked here
    and not in `screen`, since in a simulation an attack or a plug-in may send any number."""
    if task != EVALUATE:
        checked = screen(up, schema, norm_cap)
        parts = _parts_of_samples(checked, schema)
        return _without(Uplink(checked.ids, checked.fields, {**refused, **checked.refused, **parts}), parts)
    bounded = {name: field for name, field in schema.items() if field.low is not None}
    checked = screen(Uplink(up.ids, {name: up[name] for name in bounded}), bounded)
    kept = up.only(torch.isin(up.ids, checked.ids))
    wrong = _contradictions(kept)
    return _without(Uplink(kept.ids, kept.fields, {**refused, **checked.refused, **wrong}), wrong)


def _without(up: Uplink, clients: Collection[int]) -> Uplink:
    return up.only(~torch.isin(up.ids, torch.tensor(list(clients), dtype=torch.int64)))


def _parts_of_samples(up: Uplink, schema: Schema) -> dict[int, str]:
    """Return the clients whose counts are not whole numbers, with the reason."""
    out: dict[int, str] = {}
    for name in (name for name, field in schema.items() if field.kind == "count"):
        # `reshape` with explicit sizes also works when there are no rows.
        bad = (up[name] % 1 != 0).reshape(len(up), math.prod(schema[name].shape)).any(1)
        out |= {client: f"{name} is not a whole number" for client in up.ids[bad].tolist()}
    return out


def _endless(up: Uplink) -> dict[int, str]:
    """Return the clients whose measured loss is infinite, or so large that the sum may be. Such a loss may be
    honest (a logit of -inf), so it is not a fault. As long as fewer than half of the clients report one, all
    measurements of those clients are left out: one client must not make the loss of a round infinite. If more
    report one, the round has diverged."""
    out: dict[int, str] = {}
    for name in (name for name in up.fields if name.endswith("/loss")):
        total = up[f"{name.partition('/')[0]}/total"]
        bad = (total > 0) & ~torch.isfinite((up[name] / total).float())
        if 2 * int(bad.sum()) < int((total > 0).sum()):
            out |= {client: f"{name} {NOT_FINITE}" for client in up.ids[bad].tolist()}
    return out


def _contradictions(up: Uplink) -> dict[int, str]:
    """Return the clients with impossible measurements: more right answers than samples, fractions of samples,
    a loss below 0 or NaN."""
    out: dict[int, str] = {}
    for name, value in up.fields.items():
        split, _, figure = name.partition("/")
        total = up[f"{split}/total"]
        kind = figure.rpartition("/")[2]
        if kind in ("total", "correct"):
            bad, why = (value > total) | (value != value.round()), "is not a number of samples"
        elif kind == "loss":
            bad, why = ~(value >= 0), "is not a loss"
        else:
            bad, why = (value >= 0) & (total == 0), "has no samples"
        out |= {client: f"{name} {why}" for client in up.ids[bad].tolist()}
    return out


def _joined(parts: list[Uplink]) -> Uplink:
    """Join rows; the parts are in the order of their ids."""
    fields = {name: torch.cat([part[name] for part in parts]) for name in parts[0].fields}
    return Uplink(
        torch.cat([part.ids for part in parts]),
        fields,
        {c: why for part in parts for c, why in part.refused.items()},
    )
