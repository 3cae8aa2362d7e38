"""What a soak has to say: each disturbance as it happens, a table at the end, and the same as JSON or
Markdown."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"
KILL = "kill"
TITLES = (
    "part",
    "disturbance",
    "how often",
    "what followed",
    "seconds to the next commit: median, longest",
    "held",
)


@dataclass
class Disturbance:
    """One of them, and what came of it."""

    part: str
    kind: str
    victim: str
    moment: str = ""
    followed: str = ""
    at: float = 0.0
    seconds: float | None = None
    broken: str = ""
    """What was promised and did not hold."""

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.victim}" if self.victim else self.kind


@dataclass
class Outcome:
    """One part of a soak."""

    part: str
    disturbances: list[Disturbance] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    memory: dict[str, str] = field(default_factory=dict)
    peaks: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0
    finished: bool = False

    @property
    def kills(self) -> int:
        return sum(one.kind == KILL for one in self.disturbances)

    @property
    def held(self) -> bool:
        return self.finished and not self.failures and not any(one.broken for one in self.disturbances)

    def fail(self, why: str, console: Console) -> None:
        self.failures.append(why)
        console.print(Text(f"{self.part}: FAILED: {why}", style="red"), soft_wrap=True)


def rows(outcomes: list[Outcome]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for outcome in outcomes:
        for name in dict.fromkeys(
            one.name for one in sorted(outcome.disturbances, key=lambda one: (one.kind != KILL, one.name))
        ):
            ones = [one for one in outcome.disturbances if one.name == name]
            seconds = [one.seconds for one in ones if one.seconds is not None]
            took = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "–"
            broken = sum(bool(one.broken) for one in ones)
            followed = "; ".join(dict.fromkeys(one.followed for one in ones))
            found.append(
                (
                    outcome.part,
                    name,
                    str(len(ones)),
                    followed,
                    took,
                    "yes" if not broken else f"no, {broken} times",
                )
            )
    return found


def show(outcomes: list[Outcome], seed: int, console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, title in enumerate(TITLES):
        table.add_column(title, justify="right" if place in (2, 4) else "left", overflow="fold")
    for row in rows(outcomes):
        table.add_row(*row)
    console.print(table)
    for line in summary(outcomes, seed):
        console.print(line, markup=False, soft_wrap=True)


def summary(outcomes: list[Outcome], seed: int) -> list[str]:
    kills, all_of_them = (
        sum(outcome.kills for outcome in outcomes),
        sum(len(outcome.disturbances) for outcome in outcomes),
    )
    lines = [
        f"seed {seed}: {kills} kills, {all_of_them} disturbances in all,"
        f" {sum(outcome.seconds for outcome in outcomes):.0f} seconds, {os.cpu_count()} cores"
    ]
    for outcome in outcomes:
        first, second = outcome.peaks
        lines.append(
            f"{outcome.part}: {outcome.kills} kills, {len(outcome.disturbances)} disturbances,"
            f" {outcome.seconds:.0f} seconds; memory of all processes at most {first:.0f} MB in the first"
            f" half, {second:.0f} MB in the second"
        )
        lines += [f"{outcome.part}: {check}" for check in outcome.checks]
        lines += [f"{outcome.part}, memory of {role}: {words}" for role, words in outcome.memory.items()]
        lines += [
            f"{outcome.part}, not done: {why}"
            for why in [*outcome.skipped, *([] if outcome.finished else ["its end: interrupted"])]
        ]
        lines += [f"{outcome.part}, FAILED: {why}" for why in outcome.failures]
        lines += [
            f"{outcome.part}, BROKEN: {one.name} ({one.moment}): {one.broken}"
            for one in outcome.disturbances
            if one.broken
        ]
    return [
        *lines,
        (
            "verdict:"
            f" {'everything held' if all(outcome.held for outcome in outcomes) else 'something did not hold'}"
        ),
    ]


def markdown(outcomes: list[Outcome], seed: int) -> str:
    today = datetime.date.today()
    head = f"`python -m benchmarks.soak --seed {seed}`, {today.day} {today:%B %Y}:"
    lines = ["| " + " | ".join(TITLES) + " |", "|---|---|---:|---|---:|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows(outcomes)]
    return "\n".join([head, "", *lines, "", *(f"* {line}" for line in summary(outcomes, seed))])


def as_json(outcomes: list[Outcome], seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "kills": sum(outcome.kills for outcome in outcomes),
        "held": all(outcome.held for outcome in outcomes),
        "parts": [asdict(outcome) for outcome in outcomes],
    }


def write_into(page: Path, record: str) -> None:
    """Replace what stands between the markers of a page."""
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"{page} has not exactly one line {BEGIN} and, after it, one line {END}")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{record}\n{END}{after}")
