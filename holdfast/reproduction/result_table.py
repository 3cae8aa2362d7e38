"""A reproduction as a table: rows and columns as the paper has them, in every cell our figure beside the
printed one."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.report.table import Entry, Table
from holdfast.reproduction.experiments import AxisLabels
from holdfast.reproduction.outcome import Outcome
from holdfast.reproduction.study import label_text
from holdfast.reproduction.values import Value

Head = tuple[str, ...]


@dataclass(frozen=True)
class ResultCell:
    """One cell: what is in it, and how it is written."""

    metric: str
    at: AxisLabels
    ours: Value | None
    printed: Value | None
    digits: int
    best: bool = False

    @property
    def text(self) -> str:
        return written(self.ours, self.digits)

    @property
    def diverged(self) -> bool:
        return self.ours is not None and "diverged" in self.ours.note

    @property
    def printed_text(self) -> str:
        mark = " ?" if self.printed is not None and self.printed.note else ""
        return written(self.printed, self.digits) + mark if self.printed is not None else ""

    @property
    def difference(self) -> float | None:
        gap = math.nan if self.ours is None or self.printed is None else self.ours.mean - self.printed.mean
        return gap if math.isfinite(gap) else None

    @property
    def difference_text(self) -> str:
        return "" if self.difference is None else f"{self.difference:+z.{self.digits}f}".replace("-", "−")


@dataclass(frozen=True)
class ResultTable:
    axes: list[str]
    """The axes of the rows."""
    rows: list[Head]
    columns: list[Head]
    cells: list[list[ResultCell | None]]


def written(value: Value | None, digits: int) -> str:
    if value is None:
        return "–"
    if not math.isfinite(value.mean):
        return "not finite"
    spread = f" ± {value.spread:z.{digits}f}" if value.spread is not None else ""
    return f"{value.mean:z.{digits}f}{spread}" + (" d" if "diverged" in value.note else "")


def result_table(outcome: Outcome) -> ResultTable:
    """Rows and columns without any value are left out; axes that the layout does not name have one label
    each, or are averaged over."""
    study, values = outcome.study, outcome.ours
    labels = {**values.labels, "metric": list(study.metrics)}
    rows, columns = list(study.layout.rows), list(study.layout.columns)
    if "metric" not in (*rows, *columns) and len(study.metrics) > 1:
        columns.append("metric")
    if "variant" in values.labels:
        rows.append("variant")
    left = [axis for axis in values.labels if axis not in (*rows, *columns)]
    heads = [list(itertools.product(*(labels[axis] for axis in axes))) for axes in (rows, columns)]
    fixed = {axis: values.labels[axis][0] for axis in left}
    cells = [
        [
            _cell_at(
                outcome, {**fixed, **dict(zip(rows, r, strict=True)), **dict(zip(columns, c, strict=True))}
            )
            for c in heads[1]
        ]
        for r in heads[0]
    ]
    kept_rows = [i for i, row in enumerate(cells) if any(cell is not None for cell in row)]
    kept_columns = [j for j in range(len(heads[1])) if any(cells[i][j] is not None for i in kept_rows)]
    shown = [[cells[i][j] for j in kept_columns] for i in kept_rows]
    across = [
        tuple(map(label_text, columns, heads[1][j])) for j in kept_columns
    ]  # rows have their axes in the head
    return ResultTable(rows, [heads[0][i] for i in kept_rows], across, shown)


def _cell_at(outcome: Outcome, chosen: AxisLabels) -> ResultCell | None:
    study = outcome.study
    metric = chosen.get("metric", next(iter(study.metrics)))
    at = {axis: chosen[axis] for axis in outcome.ours.axes_of(metric)}
    ours = outcome.ours.get(metric, at)
    printed = outcome.printed.get(metric, {axis: label for axis, label in at.items() if axis != "variant"})
    if ours is None and printed is None:
        return None
    return ResultCell(metric, at, ours, printed, study.metrics[metric].digits, _is_best(outcome, metric, at))


def _is_best(outcome: Outcome, metric: str, at: AxisLabels) -> bool:
    """Among the methods, all else equal."""
    about, mine = outcome.study.metrics[metric], outcome.ours.mean(metric, at)
    if about.better == "neither" or "method" not in at or mine is None:
        return False
    others = [outcome.ours.mean(metric, {**at, "method": label}) for label in outcome.ours.labels["method"]]
    known = [value for value in others if value is not None]
    return (
        len(known) > 1
        and mine == (min(known) if about.less_is_better else max(known))
        and min(known) != max(known)
    )


def to_table(results: ResultTable) -> Table:
    """For Markdown and LaTeX: ours, and the printed figure in brackets."""
    titles = (" ".join(results.axes), *(" ".join(head) for head in results.columns))
    rows = []
    for head, cells in zip(results.rows, results.cells, strict=True):
        rows.append((Entry(" ".join(head)), *(_entry(cell) for cell in cells)))
    return Table(titles, tuple(rows))


def _entry(cell: ResultCell | None) -> Entry:
    if cell is None:
        return Entry("")
    text = cell.text if cell.printed is None else f"{cell.text} ({cell.printed_text})"
    return Entry(text, None if cell.ours is None else cell.ours.mean, cell.best)


def to_csv(outcome: Outcome, results: ResultTable) -> str:
    """One line per cell: its labels, ours, the printed value, the difference."""
    axes: Sequence[str] = list(outcome.ours.labels)
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(
        [
            *axes,
            "metric",
            "ours",
            "spread",
            "seeds",
            "note",
            "printed",
            "printed_spread",
            "doubtful",
            "difference",
        ]
    )
    for cell in (cell for row in results.cells for cell in row if cell is not None):
        ours, said = cell.ours, cell.printed
        mine = (
            ["", "", 0, ""]
            if ours is None
            else [ours.mean, _or_nothing(ours.spread), len(ours.seeds), ours.note]
        )
        theirs = (
            ["", "", ""] if said is None else [said.mean, _or_nothing(said.std), "yes" if said.note else ""]
        )
        lines.writerow(
            [
                *(cell.at.get(axis, "") for axis in axes),
                cell.metric,
                *mine,
                *theirs,
                _or_nothing(cell.difference),
            ]
        )
    return file.getvalue()


def _or_nothing(value: float | None) -> float | str:
    return "" if value is None else value
