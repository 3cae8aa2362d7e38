"""One table of final figures, for the terminal, for Markdown and for the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable
from rich.text import Text

from holdfast.evaluation.glossary import explain
from holdfast.report.numbers import amount, duration, percent, percent_and_spread
from holdfast.report.read_runs import RunRecord, SettingRuns, asked


@dataclass(frozen=True)
class Column:
    """A figure (or the sum of several), how to write it, and which end of it is better (+1 more, -1 less, 0
    neither)."""

    title: str
    metrics: tuple[str, ...]
    write: Callable[[float], str]
    better: int
    own_help: str = ""
    """Explanation of a sum; a single figure has that of the glossary."""
    instead: Callable[[SettingRuns], str | None] = lambda line: None
    """Words where the figure would mislead."""

    @property
    def help(self) -> str:
        return self.own_help or explain(self.metrics[0]) or self.metrics[0]

    def value(self, line: SettingRuns) -> float | None:
        found = [line.mean(metric) for metric in self.metrics]
        known = [value for value in found if value is not None]
        return sum(known) if known else None


def _nobody_caught(line: SettingRuns) -> str | None:
    """A run that bans nobody is right about every benign client, which says nothing about its defence."""
    if any(record.bans for record in line.records):
        return None
    if not any(part.get("rejected") for record in line.records for part in record.parts):
        return "no detection"
    drawn = any(not isinstance(record.manifest["malicious"], list) for record in line.records)
    return None if drawn else "no bans"  # with a redrawn set, rejections count too


ALWAYS = (
    Column("accuracy", ("accuracy",), percent, 1),
    Column("worst 10 %", ("accuracy/worst10",), percent, 1),
    Column("pooled", ("accuracy/pooled",), percent, 1),
    Column("best round", ("accuracy/best",), percent, 1),
)
ON_REQUEST = {
    "macro_f1": Column("macro-F1", ("macro_f1",), percent, 1),
    "balanced_accuracy": Column("balanced", ("balanced_accuracy",), percent, 1),
    "auc": Column("AUC", ("auc",), percent, 1),
}
BY_MODEL = tuple(
    Column(f"ASR {model}", (f"attack/asr/{model}",), percent, 0)
    for model in ("global", "customised", "personal")
)
"""Shown where a method has several models: a backdoor may be in one and not in another."""
UNDER_ATTACK = (
    Column("lost", ("attack/lost",), percent, -1),
    Column("ASR", ("attack/asr",), percent, 0),
    *BY_MODEL,
    Column("DAcc", ("detection/dacc",), percent, 1, instead=_nobody_caught),
)
WITH_PEERS = (Column("matched", ("matching/accuracy",), percent, 1),)
PRIVATE = (Column("epsilon", ("privacy/epsilon",), "{:.3g}".format, -1),)
COSTS = (
    Column("sent", ("bytes/up", "bytes/down"), amount, -1, "bytes up and down, all clients and rounds"),
    Column(
        "time",
        ("seconds/client", "seconds/server"),
        duration,
        0,
        "seconds of training and aggregation; runs that are trained together share them",
    ),
)
STATUS, CHOSEN = "status", "chosen"
WORDS = (STATUS, CHOSEN)  # columns that are read, not compared
DISPENSABLE = (
    *(column.title for column in BY_MODEL),
    "pooled",
    "best round",
    "time",
    "sent",
    "worst 10 %",
)  # in a narrow terminal; a report and --json have all


def columns(lines: Sequence[SettingRuns]) -> tuple[Column, ...]:
    """With those of the metrics that any of the runs was asked for, and of attacks, peers and privacy
    where any run has something to say."""
    attacked, peers, private = (
        [c for c in some if any(c.value(line) is not None for line in lines)]
        for some in (UNDER_ATTACK, WITH_PEERS, PRIVATE)
    )
    if sum(column in BY_MODEL for column in attacked) < 2:
        attacked = [column for column in attacked if column not in BY_MODEL]
    if not any(_looks_for_attackers(record) for line in lines for record in line.records):
        attacked = [column for column in attacked if column.title != "DAcc"]
    return (*ALWAYS, *(ON_REQUEST[metric] for metric in asked(lines)), *attacked, *peers, *private, *COSTS)


def _looks_for_attackers(record: RunRecord) -> bool:
    """Whether the run tries to detect attackers, even if it banned no client."""
    suspicions = {name for name in record.final if name.startswith("detection/auc/")} - {
        "detection/auc/weights"
    }
    return bool(record.config["detectors"] or record.bans or suspicions)


@dataclass(frozen=True)
class Entry:
    text: str
    value: float | None = None
    best: bool = False
    spread: float | None = None


@dataclass(frozen=True)
class Table:
    """Texts in rows, each knowing whether it is the best of those it is compared with."""

    titles: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]


def tabulate(lines: Sequence[SettingRuns], statuses: Sequence[str] | None = None) -> Table:
    """A row per line, in the order given; '±' is the standard deviation over seeds. The best is the best of
    those that faced the same attack on the same data. How the runs stand is a column of its own where it is
    given, or where not all are simply finished."""
    if statuses is None and any(
        record.run_status.status != "finished" for line in lines for record in line.records
    ):
        statuses = [line.status for line in lines]
    shown = columns(lines)
    faced = [_faced(line) for line in lines]
    values = {column.title: [column.value(line) for line in lines] for column in shown}
    rows = []
    for place, line in enumerate(lines):
        row = [Entry(line.label)]
        for column in shown:
            rivals = [
                value
                for value, other in zip(values[column.title], faced, strict=True)
                if other == faced[place]
            ]
            row.append(_entry(column, line, values[column.title][place], rivals))
        if statuses is not None:
            row.append(Entry(statuses[place]))
        rows.append(tuple(row))
    return Table(("", *(c.title for c in shown), *([STATUS] if statuses is not None else [])), tuple(rows))


def _faced(line: SettingRuns) -> str:
    """Who attacked, on which data, wherever that lies; nothing is known of what has not begun."""
    if not line.records:
        return ""
    config = line.records[0].config
    return json.dumps([config["attack"], {**config["data"], "dir": None}], sort_keys=True, default=str)


def _entry(column: Column, line: SettingRuns, value: float | None, rivals: Sequence[float | None]) -> Entry:
    if value is None:
        return Entry("–")
    if (words := column.instead(line)) is not None:
        return Entry(words)
    spread = line.spread(column.metrics[0]) if len(column.metrics) == 1 else None
    text = percent_and_spread(value, spread) if column.write is percent else column.write(value)
    known = [v for v in rivals if v is not None]
    extreme = max(known) if column.better > 0 else min(known)
    best = column.better > 0 and len(known) > 1 and value == extreme and min(known) != max(known)
    return Entry(text, value, best, spread)


def narrowed(table: Table, width: int) -> Table:
    """Without columns that can be done without, as many as the width asks for."""
    wide = [
        max(len(title), *(len(row[place].text) for row in table.rows)) + 2
        for place, title in enumerate(table.titles)
    ]
    left_out: set[int] = set()
    for title in DISPENSABLE:
        if title in table.titles and sum(w for place, w in enumerate(wide) if place not in left_out) > width:
            left_out.add(table.titles.index(title))
    if not left_out:
        return table
    kept = [place for place in range(len(table.titles)) if place not in left_out]
    return Table(
        tuple(table.titles[place] for place in kept),
        tuple(tuple(row[place] for place in kept) for row in table.rows),
    )


def to_rich(table: Table, title: str | None = None) -> RichTable:
    """All of it as words: Rich reads a bare string as markup."""
    out = RichTable(title_justify="left", header_style="bold", box=None, pad_edge=False, padding=(0, 1))
    out.title = None if title is None else Text(title, style="bold")
    for place, name in enumerate(table.titles):
        words = place == 0 or name in WORDS
        longest = max((len(row[place].text) for row in table.rows), default=0)
        least = (
            min(12 if name == CHOSEN else 24, longest) if words else None
        )  # a row without its name says nothing
        out.add_column(
            Text(name),
            justify="left" if words else "right",
            no_wrap=not words,
            overflow="fold",
            min_width=least,
        )
    for row in table.rows:
        out.add_row(*(Text(entry.text, style="bold green" if entry.best else "") for entry in row))
    return out


def to_markdown(table: Table) -> str:
    def record(entry: Entry) -> str:
        text = entry.text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
        text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)  # no name of a run is an element
        return f"**{text}**" if entry.best else text

    rule = "".join("---|" if title in WORDS else "---:|" for title in table.titles[1:])
    lines = ["| " + " | ".join(table.titles) + " |", "|---|" + rule]
    lines += ["| " + " | ".join(record(entry) for entry in row) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"
