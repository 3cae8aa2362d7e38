"""The state of a federation at one moment, from its folder alone: rounds and what they took, nodes,
refusals and bans, bytes, time left. `watch` shows it and the metrics export it, while the federation runs and
afterwards."""

from __future__ import annotations

import datetime
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError, in_print
from holdfast.core.reading import is_number, is_whole, parse_json, read_json, read_toml
from holdfast.deploy.deadlines import paused
from holdfast.deploy.enrolment import Enrolment, Member
from holdfast.deploy.ledger import Entry, Ledger
from holdfast.deploy.ledger_lines import line_of
from holdfast.deploy.processes import Processes
from holdfast.deploy.project import Project
from holdfast.deploy.signed_head import SIGNED_HEAD, SignedHead, read_signed_head
from holdfast.deploy.traffic import NodeTraffic, Traffic, read_traffic
from holdfast.storage.store import Store

_PRESENT = 75.0  # seconds since its last request; a SuperNode sends a heartbeat every 30
_RECENT = 5  # rounds from which the time left is estimated
_REFUSALS = 200  # lines of refused requests that are shown
_TAIL = 1 << 18  # bytes that are read of the end of their file
_REASONS = 20  # different reasons that are counted by themselves
_PAUSES = ("start", "resume")


@dataclass(frozen=True)
class Round:
    """One committed round."""

    number: int
    at: str
    seconds: float | None
    """Since the round before it was committed, or since the run was started or continued."""
    parts: Mapping[str, float]
    """By the server's clock: `client` (training on the nodes), `evaluate`, `server` and its parts."""
    took_part: Sequence[int]
    refused: Mapping[int, str]
    missing: Mapping[int, str]
    accuracy: float | None
    up: int
    down: int


@dataclass(frozen=True)
class NodeState:
    """One client that was ever enrolled."""

    client: int
    state: str
    """active, paused, banned or left."""
    why: str
    seen: float | None
    """Seconds since its last request; None if the proxy has seen none."""
    rounds: int
    last: int | None
    """The last round that it took part in."""
    strikes: int
    up: int
    down: int
    present: bool


@dataclass(frozen=True)
class Refusal:
    """Something that was refused: a reply, a request, a node without a key that is enrolled."""

    at: str
    who: str
    round: int | None
    reason: str
    strike: bool


@dataclass(frozen=True)
class Overview:
    """A federation at one moment."""

    name: str
    address: str
    state: str
    """waiting (no run yet), up, stopped or finished."""
    problem: str
    """What is wrong with ledger or run; empty if nothing."""
    round: int
    planned: int | None
    accuracy: float | None
    committed: float | None
    """When the last round was committed, in seconds since the epoch."""
    left: float | None
    """Seconds until the end, estimated from the last rounds; None when the federation is not up."""
    nodes: Sequence[NodeState] = ()
    rounds: Sequence[Round] = ()
    refusals: Sequence[Refusal] = ()
    """The newest last."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Refused replies by reason, of all runs; numbers in a reason are left out."""
    events: Sequence[tuple[str, str]] = ()
    traffic: Traffic = field(default_factory=Traffic)
    entries: int = 0
    head: str = ""
    signed: SignedHead | None = None

    @property
    def bytes(self) -> tuple[int, int]:
        """Up and down: what the nodes' updates and the models sent to them consist of."""
        return sum(one.up for one in self.rounds), sum(one.down for one in self.rounds)

    def count(self, state: str) -> int:
        return sum(node.state == state for node in self.nodes)


class Overlook:
    """Reads a federation's folder again and again, and only what was added since."""

    def __init__(self, project: Project):
        self.project, self.store = project, Store(project.run)
        self.processes = Processes(project.server / "flower", project.logs)
        self._ledger = Ledger(project.ledger_file, read=False)
        self._parts: dict[tuple[str, int], Mapping[str, float]] = {}

    def look(self) -> Overview:
        settings, up = self.project.settings, bool(self.processes.alive())
        problem = self._read_ledger()
        entries, run = self._ledger.entries, self._run(self._ledger.entries)
        rounds = self._rounds(entries, run)
        finished = (self.project.run / "result.json").exists()
        state = "finished" if finished else "up" if up else "stopped" if run else "waiting"
        committed = _epoch(rounds[-1].at) if rounds else None
        planned, traffic = self._planned(), read_traffic(self.project.server / "traffic.json")
        return Overview(
            name=settings.name,
            address=settings.address,
            state=state,
            problem=problem,
            round=rounds[-1].number if rounds else 0,
            planned=planned,
            accuracy=next((one.accuracy for one in reversed(rounds) if one.accuracy is not None), None),
            committed=committed,
            left=time_left(rounds, planned, time.time()) if state == "up" else None,
            nodes=_nodes(entries, rounds, traffic, up),
            rounds=rounds,
            refusals=self._refusals(entries),
            reasons=_reasons(entries),
            events=[(entry.at, line) for entry in entries if (line := line_of(entry))][-100:],
            traffic=traffic,
            entries=len(entries),
            head=self._ledger.head,
            signed=self._signed(),
        )

    def _read_ledger(self) -> str:
        """Read new entries. Where the ledger is damaged or was replaced, those read before are shown with the
        reason."""
        try:
            self._ledger.refresh()
        except (HoldfastError, OSError) as error:
            return " ".join(str(error).split())
        return ""

    def _signed(self) -> SignedHead | None:
        try:
            return read_signed_head(self.project.server / SIGNED_HEAD)
        except HoldfastError:
            return None

    def _run(self, entries: Sequence[Entry]) -> str:
        """Return the label of the last run; empty before the first."""
        return next((str(e.what.get("run", "")) for e in reversed(entries) if e.kind in _PAUSES), "")

    def _planned(self) -> int | None:
        try:
            manifest = read_json(self.project.run / "manifest.json")
            table = read_toml(self.project.experiment) if manifest is None else manifest["config"]
            rounds = table["train"]["rounds"]
        except (HoldfastError, OSError, ValueError, KeyError, TypeError):
            return None
        return rounds if is_whole(rounds) else None

    def _rounds(self, entries: Sequence[Entry], run: str) -> list[Round]:
        out: list[Round] = []
        since: float | None = None
        refused: dict[int, dict[int, str]] = {}
        missing: dict[int, dict[int, str]] = {}
        begun = max((e.number for e in entries if e.kind == "start"), default=0)
        for entry in entries[begun:]:
            number = entry.round or 0
            if entry.kind in _PAUSES:
                since = _epoch(entry.at)
            elif entry.kind == "strike" and entry.client is not None:
                refused.setdefault(number, {})[entry.client] = str(entry.what.get("reason", ""))
            elif entry.kind == "missing":
                for client, reason in entry.what["clients"].items():
                    missing.setdefault(number, {})[int(client) if client.isdigit() else -1] = str(reason)
            elif entry.kind == "round" and entry.what.get("run") == run:
                now = _epoch(entry.at)
                took = [client for client in entry.what.get("took_part", []) if is_whole(client)]
                out.append(
                    Round(
                        number=number,
                        at=entry.at,
                        seconds=None if since is None else max(0.0, now - since),
                        parts=self._seconds(run, number),
                        took_part=took,
                        refused=refused.get(number, {}),
                        missing=missing.get(number, {}),
                        accuracy=entry.what.get("accuracy"),
                        up=_bytes(entry.what.get("bytes/up")),
                        down=_bytes(entry.what.get("bytes/down")),
                    )
                )
                since = now
        return out

    def _seconds(self, run: str, round: int) -> Mapping[str, float]:
        """Return the seconds of a round's parts, as the run recorded them; nothing of a run that was moved
        away."""
        if (run, round) not in self._parts:
            try:
                found = (self.store.part(round) or {}).get("seconds", {})
            except HoldfastError:
                found = {}
            good = found if isinstance(found, dict) else {}
            self._parts[run, round] = {name: float(spent) for name, spent in good.items() if is_number(spent)}
        return self._parts[run, round]

    def _refusals(self, entries: Sequence[Entry]) -> list[Refusal]:
        """Return strikes and nodes without an enrolled key from the ledger, and refused requests that were no
        strikes from the proxy's file."""
        out = [
            Refusal(
                entry.at,
                "a node that is not enrolled" if entry.client is None else f"client {entry.client}",
                entry.round,
                str(entry.what.get("reason", "")),
                entry.kind == "strike",
            )
            for entry in entries
            if entry.kind in ("strike", "stranger")
        ]
        owners = {m.fingerprint: m.client for m in Enrolment.of(entries).members.values()}
        for line in _last_json_lines(self.project.server / "refusals.jsonl"):
            if line.get("strike") is not True:  # the ledger has the others
                owner = owners.get(str(line.get("fingerprint")))
                who = f"key {str(line.get('fingerprint'))[:16]}" if owner is None else f"client {owner}"
                round = line.get("round")
                at, what = in_print(str(line.get("at")))[:40], in_print(str(line.get("what")))[:200]
                out.append(Refusal(at, who, round if is_whole(round) else None, what, False))
        return sorted(out, key=lambda one: one.at)[-_REFUSALS:]


def time_left(rounds: Sequence[Round], planned: int | None, now: float) -> float | None:
    """Estimate the seconds until the end: the median of the last rounds for each that is to come, less what
    the current one has taken."""
    recent = sorted(one.seconds for one in rounds[-_RECENT:] if one.seconds is not None)
    if not recent or planned is None:
        return None
    usual = recent[len(recent) // 2]
    gone = min(usual, max(0.0, now - _epoch(rounds[-1].at)))
    return max(0.0, (planned - rounds[-1].number) * usual - gone)


def _nodes(entries: Sequence[Entry], rounds: Sequence[Round], traffic: Traffic, up: bool) -> list[NodeState]:
    resting, now = paused(entries), time.time()
    suspects = {e.client: str(e.what.get("reason", "")) for e in entries if e.kind == "suspect"}
    out = []
    for client, member in sorted(Enrolment.of(entries).members.items()):
        seen = traffic.nodes.get(member.fingerprint, NodeTraffic())
        age = max(0.0, now - seen.seen) if seen.seen else None
        took_part = [one.number for one in rounds if client in one.took_part]
        absent = rounds[-1].missing.get(client, "") if rounds else ""
        state = _state(member, resting)
        until = f"is not asked before round {resting[client]}" if state == "paused" else ""
        struck = member.strikes[-1] if member.strikes else ""
        out.append(
            NodeState(
                client=client,
                state=state,
                why=member.banned or until or absent or struck or suspects.get(client, ""),
                seen=age,
                rounds=len(took_part),
                last=took_part[-1] if took_part else None,
                strikes=len(member.strikes),
                up=seen.up,
                down=seen.down,
                present=up and state in ("active", "paused") and age is not None and age < _PRESENT,
            )
        )
    return out


def _state(member: Member, resting: Mapping[int, int]) -> str:
    if member.banned is not None:
        return "banned"
    return "left" if member.left else "paused" if member.client in resting else "active"


def _reasons(entries: Sequence[Entry]) -> Mapping[str, int]:
    """Count strikes by reason; rare reasons beyond the first few are counted together."""
    counts = Counter(_reason(entry) for entry in entries if entry.kind == "strike")
    kept = dict(counts.most_common(_REASONS))
    if other := counts.total() - sum(kept.values()):
        kept["other"] = kept.get("other", 0) + other
    return kept


def _reason(entry: Entry) -> str:
    """Return a reason without its numbers, so that equal faults count as one."""
    return re.sub(r"\d[\d,.]*", "N", in_print(str(entry.what.get("reason", ""))))[:80]


def _last_json_lines(file: Path) -> list[dict[str, Any]]:
    try:
        with open(file, "rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(max(0, size - _TAIL))
            lines = opened.read(_TAIL).splitlines()[-_REFUSALS:]
    except FileNotFoundError:
        return []
    out = []
    for line in lines:
        try:
            content = parse_json(line)
        except ValueError:
            continue
        out += [content] if isinstance(content, dict) else []
    return out


def _bytes(value: Any) -> int:
    return int(value) if is_number(value) and value >= 0 else 0


def _epoch(at: str) -> float:
    return datetime.datetime.fromisoformat(at).timestamp()
