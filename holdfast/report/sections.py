"""Smaller sections of the page: its title and facts, every client, the data, all runs, and how to repeat
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.toml import to_toml
from holdfast.report import plots
from holdfast.report.charts import heat_map, strips
from holdfast.report.class_counts import Holdings, in_words, spread
from holdfast.report.heat_map_files import holdings_drawing
from holdfast.report.markup import Section, fill
from holdfast.report.numbers import percent
from holdfast.report.read_runs import RunRecord, SettingRuns
from holdfast.report.rerun_config import command, config_text, without_defaults
from holdfast.report.settings_by_attack import BENIGN, SettingsByAttack
from holdfast.report.table import STATUS

MOST_CLIENTS = 100  # columns of the heat map
MOST_DOTS = 6000  # clients' dots on a page


def title(lines: Sequence[SettingRuns], by_attack: SettingsByAttack) -> str:
    data = " and ".join(sorted({str(line.records[0].config["data"]["name"]) for line in lines}))
    attacks = len({one.attack for one in by_attack.faced} - {BENIGN})
    names = by_attack.settings if attacks > 1 else [line.label for line in lines]
    who = (
        names[0]
        if len(names) == 1
        else ", ".join(names[:-1]) + " and " + names[-1]
        if len(names) <= 4
        else f"{len(names)} settings"
    )
    return f"{who}{f' under {attacks} attacks' if attacks > 1 else ''} on {data}"


def facts(lines: Sequence[SettingRuns]) -> list[tuple[str, str]]:
    """The setting in a line; what differs between runs is left out."""
    records = [record for line in lines for record in line.records]
    fewest, seeds = (most(line.seeds for line in lines) for most in (min, max))
    rows = [
        ("", _common(records, lambda c: f"{c.manifest['clients']} clients")),
        ("data ", _common(records, lambda c: c.config["data"]["name"])),
        ("partition ", _common(records, lambda c: in_words(c.config["data"]["partition"]))),
        (
            "model ",
            _common(
                records, lambda c: f"{in_words(c.config['model'])}, {c.manifest['parameters']:,} parameters"
            ),
        ),
        ("", _common(records, lambda c: f"{c.rounds} rounds")),
        (
            "",
            (
                None
                if seeds == 1
                else f"{seeds} seeds each"
                if fewest == seeds
                else f"{fewest} to {seeds} seeds each"
            ),
        ),
        (
            "attack ",
            _common(
                records, lambda c: in_words(c.config["attack"]) if c.config["attack"] is not None else "none"
            ),
        ),
    ]
    return [(word, value) for word, value in rows if value]


def clients(lines: Sequence[SettingRuns], by_attack: SettingsByAttack) -> Section | None:
    """A dot for every client."""
    rows = [(line.label, line.dots(), line.mean("accuracy"), line.mean("accuracy/worst10")) for line in lines]
    if not any(dots for _, dots, _, _ in rows):
        return None
    many, most = max(len(dots) for _, dots, _, _ in rows), max(60, min(600, MOST_DOTS // len(rows)))
    places = [by_attack.place(line) for line in lines]
    body = fill(
        "sections/clients.html",
        chart=strips(rows, most, places),
        attackers=any(dot.malicious for _, dots, _, _ in rows for dot in dots),
        thinned_from=many if many > most else 0,
        rows=len(lines),
    )
    return Section("Every client", body, [plots.client_dots(rows, places)])


def partition(records: Sequence[RunRecord]) -> Section:
    """Which client holds what, for the first run; a seed deals the data of the others anew."""
    record = records[0]
    try:
        holdings = Holdings.of(record.run.data_config)
    except HoldfastError as error:
        return Section("Data of every client", fill("sections/no_data.html", error=str(error)))
    body = fill(
        "sections/partition.html",
        sizes=spread(holdings.sizes),
        seed=record.seed,
        others=len({c.manifest["partition"] for c in records}) - 1,
        shown=MOST_CLIENTS,
        clients=len(holdings.counts),
        chart=heat_map(
            holdings.counts[:MOST_CLIENTS].tolist(), holdings.names, heads=holdings.clients[:MOST_CLIENTS]
        ),
    )
    return Section("Data of every client", body, [holdings_drawing(holdings)])


def repeat(records: Sequence[RunRecord]) -> Section:
    """The command and the config that give the same runs again."""
    text = config_text(records)
    each = [
        (str(record.manifest["label"]), to_toml(without_defaults(record.config)))
        for record in (records if text is None else ())
    ]
    body = fill("sections/repeat.html", command=command(records), config=text, each=each)
    return Section("Run it again", body)


def runs(records: Sequence[RunRecord], links: Mapping[Path, str]) -> Section | None:
    """Every run of a large sweep, with a link to its own page."""
    if not links:
        return None
    rows = []
    for record in records:
        figures = [record.final.get(name) for name in ("accuracy", "accuracy/worst10", "attack/lost")]
        texts = [(value, "–" if value is None else percent(value)) for value in figures]
        label = str(record.manifest["label"] or record.label)
        rows.append((links[record.path], label, texts, record.run_status.words))
    return Section("Every run", fill("sections/runs.html", rows=rows, status=STATUS))


def _common(records: Sequence[RunRecord], of: Any) -> str | None:
    values = {str(of(record)) for record in records}
    return values.pop() if len(values) == 1 else None
