"""The numbers of a table: means over seeds, differences, ranks. Published numbers are read the same way, so a
claim can be checked on both."""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from holdfast.reproduction.experiments import AxisLabels, StudyGrid
from holdfast.reproduction.measures import measured
from holdfast.reproduction.study import Metric, Study, as_labels, matches
from holdfast.results.run import Run

Axes = tuple[tuple[str, str], ...]
Place = tuple[str, Axes]
"""A metric, and the labels of the axes that are not averaged."""


def place(metric: str, at: Mapping[str, str]) -> Place:
    return metric, tuple(sorted(at.items()))


@dataclass(frozen=True)
class Value:
    """One number of the table: its value for every seed, and a note."""

    seeds: tuple[float, ...]
    note: str = ""
    std: float | None = None
    """The published standard deviation; ours is computed from the seeds."""

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.seeds))

    @property
    def mean(self) -> float:
        """NaN if a seed is not finite: the mean of the others would favour a method that sometimes
        diverges."""
        return statistics.fmean(self.seeds) if self.finite else math.nan

    @property
    def spread(self) -> float | None:
        return (
            self.std
            if self.std is not None
            else statistics.stdev(self.seeds)
            if len(self.seeds) > 1 and self.finite
            else None
        )


@dataclass
class Values:
    """All numbers of a table by place; places without a number are left out."""

    study: Study
    labels: Mapping[str, Sequence[str]]
    """The labels of each axis that are shown, `variant` included where it is an axis."""
    by_place: dict[Place, Value] = field(default_factory=dict)

    def get(self, metric: str, at: Mapping[str, str]) -> Value | None:
        return self.by_place.get(place(metric, at))

    def mean(self, metric: str, at: Mapping[str, str]) -> float | None:
        found = self.get(metric, at)
        return None if found is None or not math.isfinite(found.mean) else found.mean

    def axes_of(self, metric: str) -> list[str]:
        """Return the axes along which a metric has values."""
        averaged = set(self.study.metrics[metric].mean)
        for other in self.study.metrics[metric].of:
            averaged |= set(self.study.metrics[other].mean)
        return [axis for axis in self.labels if axis not in averaged]

    def places(self, metric: str, where: Mapping[str, Any] | None = None) -> Iterable[AxisLabels]:
        """Iterate over all places of a metric that are shown, restricted to some labels."""
        axes = self.axes_of(metric)
        for labels in itertools.product(*(self.labels[axis] for axis in axes)):
            at = dict(zip(axes, labels, strict=True))
            if matches(
                {axis: as_labels(wanted) for axis, wanted in (where or {}).items() if axis in axes}, at
            ):
                yield at


def ours(grid: StudyGrid, runs: Mapping[Place, Sequence[Run | None]]) -> Values:
    """Read our numbers. `runs` holds the runs of all seeds by `place("", at)`; None where one has not
    finished."""
    labels: dict[str, Sequence[str]] = dict(grid.labels)
    if len(grid.variants) > 1:
        labels["variant"] = grid.variants
    out = Values(grid.study, labels)
    for name, metric in grid.study.metrics.items():
        if metric.of:
            continue
        for at in {
            key: dict(planned.at) for planned in grid.planned_runs for key in [place("", planned.at)]
        }.values():
            if not matches(metric.where, at) and not metric.minus:  # the subtrahend may lie outside
                continue
            finished = [run for run in runs[place("", at)] if run is not None]
            figures = [value for run in finished if (value := _read(metric, run, at)) is not None]
            if figures:
                out.by_place[place(name, at)] = Value(tuple(figures), _diverged(finished))
    _derive(out)
    return out


def _read(metric: Metric, run: Run, at: Mapping[str, str]) -> float | None:
    if metric.measure is not None:
        value = measured(metric.measure)(run, *([at[metric.by]] if metric.by is not None else []))
    else:
        figure = next(
            (one.figure for one in reversed(metric.override) if matches(one.when, at)), metric.figure
        )
        known = [float(found) for name in as_labels(figure) if (found := run.final.get(name)) is not None]
        value = max((v for v in known if v == v), default=known[0] if known else None)
    if value is None:
        return None
    return value * metric.times / (run.round if metric.per_round else 1)


def _diverged(runs: Sequence[Run]) -> str:
    rounds = [run.final.get("diverged") for run in runs]
    many = sum(when is not None for when in rounds)
    return "" if not many else "diverged" if many == len(runs) else f"{many} of {len(runs)} seeds diverged"


def printed(study: Study, labels: Mapping[str, Sequence[str]]) -> Values:
    """Read the published numbers for the same places; figures have none. The paper has no axis `variant`."""
    out = Values(study, {axis: shown for axis, shown in labels.items() if axis != "variant"})
    if study.printed is None:
        return out
    rows = {
        tuple(row[key] for key in ("table", "dataset", "setting", "method", "metric")): row
        for row in printed_rows(study.paper)
    }
    for name, metric in study.metrics.items():
        for at in out.places(name, metric.where):
            filled = {axis: at.get(axis, "") for axis in study.axes}
            where = (
                text.format(**filled)
                for text in (study.print.dataset, study.print.setting, study.print.method)
            )
            row = rows.get(
                (
                    study.printed,
                    *(study.print.instead.get(text, text) for text in where),
                    metric.printed or name,
                )
            )
            if row is not None:
                doubt = "doubtful in print" if row["doubtful"] else ""
                out.by_place[place(name, at)] = Value(
                    (float(row["value"]),), doubt, float(row["std"]) if row["std"] else None
                )
    _subtract(out)
    return out


def _subtract(values: Values) -> None:
    """Compute differences that are not published themselves from published values."""
    there = {name for name, _ in values.by_place}
    for name, metric in values.study.metrics.items():
        if metric.minus and name not in there:
            whole = next(
                (
                    of
                    for of, other in values.study.metrics.items()
                    if other.figure == metric.figure and of in there
                ),
                None,
            )
            if whole is None:
                continue
            times = metric.times / values.study.metrics[whole].times  # the factor of a loss is negative
            mine = {
                at: replace(v, seeds=tuple(times * one for one in v.seeds))
                for (of, at), v in values.by_place.items()
                if of == whole
            }
            for at, value in mine.items():
                less = _less(value, mine.get(_moved(at, metric.minus)))
                if less is not None and matches(metric.where, dict(at)):
                    values.by_place[name, at] = less


def printed_rows(paper: str) -> list[dict[str, str]]:
    file = files("holdfast.reproduction") / "printed" / f"{paper.lower()}.csv"
    return list(csv.DictReader(io.StringIO(file.read_text())))


def _derive(values: Values) -> None:
    """Compute differences (also to places that a metric does not show), ranks, means over axes and means of
    metrics, in this order."""
    for name, metric in values.study.metrics.items():
        mine: dict[Axes, Value | None] = {
            at: value for (of, at), value in values.by_place.items() if of == name
        }
        if metric.minus:
            mine = {at: _less(value, mine.get(_moved(at, metric.minus))) for at, value in mine.items()}
        if metric.where:
            mine = {at: value for at, value in mine.items() if matches(metric.where, dict(at))}
        if metric.rank is not None:
            mine = _ranked(mine, metric.rank, metric.better)
        if metric.mean:
            mine = _averaged(mine, metric.mean)
        if metric.minus or metric.where or metric.rank is not None or metric.mean:
            values.by_place = {key: value for key, value in values.by_place.items() if key[0] != name}
            values.by_place |= {(name, at): value for at, value in mine.items() if value is not None}
    for name, metric in values.study.metrics.items():
        if metric.of:
            for at in values.places(name):
                parts = [part for other in metric.of if (part := values.mean(other, at)) is not None]
                if len(parts) == len(metric.of):
                    values.by_place[place(name, at)] = Value((statistics.fmean(parts),))


def _moved(at: Axes, to: Mapping[str, str]) -> Axes:
    return tuple((axis, to.get(axis, label)) for axis, label in at)


def _less(value: Value | None, other: Value | None) -> Value | None:
    """Subtract seed by seed if both have the same number of seeds, else the means."""
    if value is None or other is None:
        return None
    if len(value.seeds) == len(other.seeds):
        return Value(tuple(a - b for a, b in zip(value.seeds, other.seeds, strict=True)), value.note)
    return Value((value.mean - other.mean,), value.note)


def _ranked(mine: Mapping[Axes, Value | None], axis: str, better: str) -> dict[Axes, Value | None]:
    groups: dict[Axes, dict[Axes, float]] = {}
    for at, value in mine.items():
        if value is not None:
            rest = tuple(pair for pair in at if pair[0] != axis)
            mark = value.mean if better == "less" else -value.mean
            groups.setdefault(rest, {})[at] = (
                mark if math.isfinite(mark) else math.inf
            )  # diverged runs come last
    return {
        at: Value((1.0 + sum(other < mark for other in group.values()),))
        for group in groups.values()
        for at, mark in group.items()
    }


def _averaged(mine: Mapping[Axes, Value | None], axes: Sequence[str]) -> dict[Axes, Value | None]:
    groups: dict[Axes, list[float]] = {}
    for at, value in mine.items():
        if value is not None:
            groups.setdefault(tuple(pair for pair in at if pair[0] not in axes), []).append(value.mean)
    most = max(map(len, groups.values()), default=0)
    out: dict[Axes, Value | None] = {}
    for at, found in groups.items():
        mean = statistics.fmean(found) if all(map(math.isfinite, found)) else math.nan
        out[at] = Value(
            (mean,), "" if len(found) == most else f"mean of {len(found)} cells, others of {most}"
        )
    return out
