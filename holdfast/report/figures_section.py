"""The result on a page: the verdict in words, maps of settings by attack, and the table of final figures."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from holdfast.report.attack_effects import attacked
from holdfast.report.charts import swatch
from holdfast.report.equal_runs import without_effect
from holdfast.report.instability import unstable
from holdfast.report.markup import Section, fill
from holdfast.report.read_runs import RunRecord, SettingRuns, not_begun
from holdfast.report.robustness_map import map_drawing, score_map
from holdfast.report.settings_by_attack import BENIGN, WORST, ScoreGrid, SettingsByAttack
from holdfast.report.table import STATUS, columns, tabulate


def headline(lines: Sequence[SettingRuns], by_attack: SettingsByAttack) -> Section:
    """What shows the result: maps of settings by attack where there are some, else the figures."""
    if grids := _mapped(by_attack):
        return _maps(grids)
    question = (
        "Accuracy under attack"
        if attacked(lines) and len(lines) > 1
        else "Comparison"
        if len(lines) > 1
        else "Figures"
    )
    return Section(question, _figures(lines, by_attack, ranked=True) + _all_figures(lines))


def figures(lines: Sequence[SettingRuns], by_attack: SettingsByAttack) -> Section | None:
    """The figures, where the maps are shown first."""
    if not _mapped(by_attack):
        return None
    table = _figures(lines, by_attack, ranked=False) + _all_figures(lines)
    return Section("Figures", fill("folded.html", content=table, rows=len(lines)))


def _mapped(by_attack: SettingsByAttack) -> list[ScoreGrid]:
    """A map for each dataset. Without two attacks or two settings to compare, the table of figures is
    enough."""
    return [grid for grid in by_attack.grids if len(grid.attacks) > 1 and len(grid.settings) > 1]


def _maps(grids: Sequence[ScoreGrid]) -> Section:
    several = len(grids) > 1
    maps = [
        (grid.data if several else "", score_map(grid, f", {grid.data}" if several else "")) for grid in grids
    ]
    worst = any(WORST in grid.columns for grid in grids)
    honest = any(BENIGN in grid.attacks for grid in grids)
    body = fill("sections/maps.html", maps=maps, worst=worst, honest=honest)
    return Section("Accuracy under attack", body, [map_drawing(grid, several) for grid in grids])


def _figures(lines: Sequence[SettingRuns], by_attack: SettingsByAttack, ranked: bool) -> Markup:
    """The table of figures. `ranked`: the best of a column is marked, which is useful where all rows faced
    the same attack."""
    table, shown = tabulate(lines), columns(lines)
    starred = ranked and any(entry.best for row in table.rows for entry in row)
    rows = []
    for line, row in zip(lines, table.rows, strict=True):
        records = [
            (_kind(name, len(entry.text), entry.best and ranked), entry)
            for name, entry in zip(table.titles[1:], row[1:], strict=True)
        ]
        rows.append((swatch(by_attack.place(line)), row[0].text, records))
    return fill(
        "sections/figures.html",
        columns=shown,
        more=table.titles[len(shown) + 1 :],
        rows=rows,
        starred=starred,
        notes=_notes(lines, by_attack, starred),
        status=STATUS,
    )


def _kind(name: str, letters: int, best: bool) -> str:
    """The class of a table's cell."""
    if name == STATUS:
        return STATUS if letters > 24 else "brief"
    return "best" if best else "plain"


def _notes(lines: Sequence[SettingRuns], by_attack: SettingsByAttack, starred: bool) -> list[str]:
    several = len(by_attack.grids) > 1 or any(len(grid.attacks) > 1 for grid in by_attack.grids)
    alike = " among settings that faced the same attack" if several else ""
    notes = [f"★ best of its column{alike}."] if starred else []
    if any(line.seeds > 1 for line in lines):
        notes.append("± is the standard deviation over seeds.")
    if len(lines) > 1 or lines[0].seeds > 1:
        notes.append("Runs that are trained together share their time, so times do not rank methods.")
    return notes + _troubles([record for line in lines for record in line.records])


def _troubles(records: Sequence[RunRecord]) -> list[str]:
    """What keeps figures from being what they seem."""
    status = [record.run_status.status for record in records]
    notes = []
    if unfinished := sum(said in ("begun", "not begun") for said in status):
        have = (
            "has not finished; its figures are those of its"
            if unfinished == 1
            else "have not finished; their figures are those of their"
        )
        notes.append(f"{unfinished} of the runs {have} last evaluated round.")
    if diverged := status.count("diverged"):
        notes.append(
            f"{diverged} of the runs diverged: from that round on, or for some rounds, no update"
            " could be used."
        )
    if failed := status.count("failed"):
        notes.append(f"{failed} of the runs failed and have no figures.")
    if noted := [note for record in records for part in record.parts for note in part.get("attack", [])]:
        notes.append(f"In some rounds an attack deviated from its formula: {noted[0]}.")
    notes += [*unstable(records), *without_effect(records)]
    if missing := not_begun(records):
        notes.append(
            f"{missing} cells of the sweep have not begun, or failed before their first round, and are not"
            " shown."
        )
    return notes


def _all_figures(lines: Sequence[SettingRuns]) -> Markup:
    """Every final figure, also those that have no column above."""
    names = sorted(
        {name for line in lines for record in line.records for name in record.final} - {"diverged"}
    )  # the mean of rounds means nothing
    rows = [(name, [line.mean(name) for line in lines]) for name in names]
    return fill(
        "sections/all_figures.html",
        labels=[line.label for line in lines],
        rows=[(name, values) for name, values in rows if any(value is not None for value in values)],
        several_seeds=any(line.seeds > 1 for line in lines),
    )
