"""The live page of a federation: nodes, rounds, refusals and bans with their reasons, bytes, time left. It is
made from the federation's folder, so it also works after the end and for a federation that stopped."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from holdfast.core.errors import in_print
from holdfast.deploy.overview import NodeState, Overlook, Overview, Round
from holdfast.deploy.project import Project
from holdfast.report.axis import Axis, Point, nice_ticks
from holdfast.report.charts import Series, curves
from holdfast.report.markup import script_json, whole_page
from holdfast.report.numbers import amount, duration, percent

_FRESH = 1.0  # seconds for which a look at the disk is good enough
_TICK = 10  # seconds after which the page of a running federation is drawn again without news
_ROUNDS = 30  # in the table
_MARKED = 48  # rounds for which the participation of a node is drawn
MARKS = {"here": "●", "missing": "○", "refused": "✗", "away": "·"}


@dataclass(frozen=True)
class WatchState:
    """Whether there is more to show, and the line at the bottom of the page."""

    version: str
    words: str
    finished: bool
    committed: float | None

    def plain(self) -> dict[str, Any]:
        age = None if self.committed is None or self.finished else max(0, round(time.time() - self.committed))
        return {"version": self.version, "words": self.words, "finished": self.finished, "age": age}


class WatchPages:
    """The one page of a federation, drawn again only when something changed; many threads may ask."""

    def __init__(self, project: Project):
        self._overlook, self._lock = Overlook(project), threading.Lock()
        self._looked = -math.inf
        self._seen: Overview | None = None
        self._drawn = ("", "")

    def has(self, path: str) -> bool:
        return path == "/"

    def state(self, path: str = "/") -> WatchState:
        with self._lock:
            return _state(self._now())

    def page(self, path: str = "/") -> str:
        with self._lock:
            seen = self._now()
            state = _state(seen)
            if self._drawn[0] != state.version:
                self._drawn = state.version, watch_page(seen, script_json(state.plain()))
            return self._drawn[1]

    def _now(self) -> Overview:
        if self._seen is None or time.monotonic() - self._looked >= _FRESH:
            self._seen, self._looked = self._overlook.look(), time.monotonic()
        return self._seen


def _state(seen: Overview) -> WatchState:
    about = [
        seen.state,
        seen.problem,
        seen.entries,
        seen.head,
        seen.round,
        [node.present for node in seen.nodes],
        len(seen.refusals),
        int(time.time() / _TICK) if seen.state == "up" else 0,
    ]
    version = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    return WatchState(version, _words(seen), seen.state == "finished", seen.committed)


def _words(seen: Overview) -> str:
    if seen.state == "finished":
        return "finished"
    if seen.state == "waiting":
        return "waiting for the run to begin"
    planned = "" if seen.planned is None else f" of {seen.planned} rounds"
    return f"{seen.round}{planned}" + ("" if seen.state == "up" else "; the federation is stopped")


def watch_page(seen: Overview, live: Markup | None = None) -> str:
    """Render the page of one moment."""
    up, down = seen.bytes
    wire = seen.traffic.nodes.values()
    facts = [
        ("nodes ", f"{len(seen.nodes)} known, {sum(node.present for node in seen.nodes)} present"),
        ("paused ", seen.count("paused")),
        ("banned ", seen.count("banned")),
        ("updates ", f"{amount(up)} up, {amount(down)} down"),
        (
            "through the proxy ",
            f"{amount(sum(n.up for n in wire))} up, {amount(sum(n.down for n in wire))} down",
        ),
        ("address ", seen.address),
    ]
    return whole_page(
        "watch.html",
        title=f"{seen.name}: federation",
        name=in_print(seen.name),
        facts=facts,
        verdict=_verdict(seen),
        problem=in_print(seen.problem),
        charts=_charts(seen.rounds),
        nodes=[_node(node, seen) for node in seen.nodes],
        marks=MARKS,
        marked=_MARKED,
        rounds=[_round(one) for one in reversed(seen.rounds[-_ROUNDS:])],
        hidden=max(0, len(seen.rounds) - _ROUNDS),
        refusals=[
            (one.at, in_print(one.who), one.round, in_print(one.reason), one.strike)
            for one in reversed(seen.refusals)
        ],
        unauthenticated=seen.traffic.unauthenticated,
        events=[(at, in_print(line)) for at, line in reversed(seen.events)],
        entries=seen.entries,
        head=seen.head,
        signed=None if seen.signed is None else (seen.signed.entries, seen.signed.at),
        live=live,
    )


def _verdict(seen: Overview) -> str:
    """The state in one sentence."""
    if seen.state == "waiting":
        return "The run has not begun: no round is committed."
    state = {"up": "running", "stopped": "stopped", "finished": "finished"}[seen.state]
    planned = "" if seen.planned is None else f" of {seen.planned}"
    words = f"{state.capitalize()} after round {seen.round}{planned}"
    if seen.state == "up":
        words = f"Running: round {seen.round}{planned} is committed"
    if seen.accuracy is not None:
        words += f", accuracy {percent(seen.accuracy)}"
    if seen.rounds:
        words += f"; {len(seen.rounds[-1].took_part)} clients took part in the last round"
    left = "" if seen.left is None else f" About {_rough(seen.left)} left."
    stopped = " `holdfast federation resume` continues it." if seen.state == "stopped" else ""
    return f"{words}.{left}{stopped}"


def _rough(seconds: float) -> str:
    return f"{round(seconds)} s" if seconds < 120 else duration(seconds)


def _charts(rounds: Sequence[Round]) -> list[tuple[str, Markup]]:
    accuracy: list[Point] = [
        (one.number, one.accuracy, one.accuracy, one.accuracy) for one in rounds if one.accuracy is not None
    ]
    out = [("Accuracy", curves([Series("accuracy", accuracy)], "accuracy", True))] if accuracy else []
    series = []
    for name, label in (("", "all"), ("client", "training"), ("evaluate", "evaluation")):
        spent = {one.number: one.parts.get(name) if name else one.seconds for one in rounds}
        points: list[Point] = [
            (number, value, value, value) for number, value in spent.items() if value is not None
        ]
        series += [Series(label, points)] if points else []
    if series:
        most = max(point[1] for one in series for point in one.points)
        axis = Axis(nice_ticks(0.0, max(most, 0.1)))
        out.append(("Seconds of a round", curves(series, "seconds", False, axis=axis)))
    return out


def _node(node: NodeState, seen: Overview) -> dict[str, Any]:
    kinds = [_kind(node.client, one) for one in seen.rounds[-_MARKED:]]
    presence = (
        "present"
        if node.present
        else "–"
        if seen.state != "up" or node.state in ("banned", "left")
        else "away"
    )
    return {
        "client": node.client,
        "state": node.state,
        "present": presence,
        "seen": _ago(node.seen),
        "rounds": f"{node.rounds}" + ("" if node.last is None else f", the last is {node.last}"),
        "marks": "".join(MARKS[kind] for kind in kinds),
        "counts": ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "no round yet",
        "bytes": f"{amount(node.up)} up, {amount(node.down)} down",
        "strikes": node.strikes,
        "why": in_print(node.why),
    }


def _ago(seconds: float | None) -> str:
    """Return when a node was seen, by the clock: a page of a federation that ended stays right."""
    if seconds is None:
        return "never"
    at = datetime.datetime.fromtimestamp(time.time() - seconds, datetime.UTC)
    today = at.date() == datetime.datetime.now(datetime.UTC).date()
    return f"{at:%H:%M:%S}" if today else f"{at:%Y-%m-%d %H:%M}"


def _kind(client: int, one: Round) -> str:
    if client in one.refused:
        return "refused"
    return "here" if client in one.took_part else "missing" if client in one.missing else "away"


def _round(one: Round) -> dict[str, Any]:
    return {
        "number": one.number,
        "at": one.at[:19].replace("T", " "),
        "seconds": "–" if one.seconds is None else duration(one.seconds),
        "parts": [
            duration(one.parts[name]) if name in one.parts else "–"
            for name in ("client", "evaluate", "server")
        ],
        "took_part": len(one.took_part),
        "refused": ", ".join(map(str, sorted(one.refused))) or "–",
        "missing": ", ".join(map(str, sorted(one.missing))) or "–",
        "accuracy": "–" if one.accuracy is None else percent(one.accuracy),
        "bytes": f"{amount(one.up)} up, {amount(one.down)} down",
    }
