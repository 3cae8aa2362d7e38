"""The charts of a reproduction's page: one for each `show` of its study."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from markupsafe import Markup

from holdfast.diagnostics.computed import grad_cam
from holdfast.diagnostics.gradcam import carriers
from holdfast.report import plots
from holdfast.report.axis import Axis
from holdfast.report.axis_chart import along
from holdfast.report.charts import Series, curves, heat_map
from holdfast.report.markup import Section, fill
from holdfast.reproduction.experiments import AxisLabels
from holdfast.reproduction.outcome import Outcome
from holdfast.reproduction.study import ChartSpec, as_labels, label_text, matches
from holdfast.reproduction.values import place
from holdfast.results.run import Run

_IMAGES = 3
"""Of a picture that shows where models look."""


def chart(outcome: Outcome, number: int, show: ChartSpec) -> Section | None:
    """One chart with its heading; None where no experiment that it shows belongs to this reproduction."""
    if not any(matches(show.where, planned.at) for planned in outcome.grid.planned_runs):
        return None
    draw = {"rounds": _over_rounds, "along": _along, "matrix": _matrix, "grad-cam": _looks}[show.kind]
    return draw(outcome, number, show)


def _over_rounds(outcome: Outcome, number: int, show: ChartSpec) -> Section:
    series = []
    for at, runs in _groups(outcome, show):
        by_round = [_by_round(run, show.figure) for run in runs]
        for kind in dict.fromkeys(kind for one in by_round for kind in one):
            found = [one.get(kind, {}) for one in by_round]
            rounds = sorted(set.intersection(*map(set, found)))
            points = [
                (r, statistics.fmean(c[r] for c in found), min(c[r] for c in found), max(c[r] for c in found))
                for r in rounds
            ]
            series.append(Series(f"{_name(outcome, at, _fixed(show))} {kind}".strip(), points))
    percent = show.figure.startswith("accuracy")
    every = [point for one in series for point in one.points]
    axis = Axis.over(every) if every and not percent else None
    drawn = curves(series, f"{show.figure} {number}", percent, axis=axis)
    title = f"{show.figure} over the rounds{_of(show)}"
    lines = [(one.label, one.points) for one in series]
    drawing = plots.curves(lines, show.figure, percent, "round", axis)
    return Section(title, drawn, [replace(drawing, name=title)])


def _by_round(run: Run, figure: str) -> dict[str, dict[int, float]]:
    """A figure of every round; or, of a recorded table, the median over benign and over malicious clients."""
    frame = run.metrics
    if figure in frame:
        return {"": {int(r): float(v) for r, v in zip(frame["round"], frame[figure], strict=True) if v == v}}
    if figure not in run.tables:
        return {}
    table = run.table(figure)
    table = table[table["value"] < float("inf")]
    kinds = {"benign": table[~table["malicious"]], "malicious": table[table["malicious"]]}
    return {
        kind: {int(r): float(v) for r, v in of.groupby("round")["value"].median().items()}
        for kind, of in kinds.items()
        if len(of)
    }


def _along(outcome: Outcome, number: int, show: ChartSpec) -> Section:
    assert show.axis is not None
    metric, values = show.metric or next(iter(outcome.study.metrics)), outcome.ours
    kept = {axis: labels for axis, labels in show.where.items() if axis == show.axis}
    labels = [label for label in values.labels[show.axis] if matches(kept, {show.axis: label})]
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for at in values.places(metric, show.where):
        found = values.get(metric, at)
        if found is not None and found.finite:
            dots = lines.setdefault(_name(outcome, at, (show.axis, *_fixed(show))) or metric, [])
            dots.append((labels.index(at[show.axis]), found.mean, min(found.seeds), max(found.seeds)))
    shown = [(name, sorted(dots)) for name, dots in lines.items()]
    drawn = along(shown, labels, metric, show.axis)
    title = f"{metric} by {show.axis}{_of(show)}"
    drawing = plots.along(shown, labels, metric, show.axis)
    return Section(title, drawn, [replace(drawing, name=title)])


def _matrix(outcome: Outcome, number: int, show: ChartSpec) -> Section:
    """The last round of a recorded table, of the first seed of every place."""
    maps: list[tuple[str, Markup]] = []
    drawings = []
    for at, runs in _groups(outcome, show):
        if show.figure not in runs[0].tables:
            continue
        frame = runs[0].table(show.figure)
        last = frame[frame["round"] == frame["round"].max()].pivot(
            index="client", columns="other", values="value"
        )
        texts = [[f"{value:.2f}".removeprefix("0") for value in row] for row in last.to_numpy().tolist()]
        values, name = last.fillna(0).to_numpy().tolist(), _name(outcome, at, ())
        names, heads = [str(c) for c in last.columns], [str(c) for c in last.index]
        drawn = heat_map(
            values,
            names,
            show.figure,
            first=1000 * number + len(maps) + 1,
            heads=heads,
            words=("client", "other", ""),
            texts=texts,
        )
        maps.append((name, drawn))
        most, title = max(map(max, values), default=0.0), f"{show.figure} {name}"
        drawings.append(plots.heat_map(values, heads, names, ("client", "other"), texts, most, title))
    body = fill("maps.html", package="holdfast.reproduction", note="", maps=maps)
    return Section(f"{show.figure.capitalize()}, last round", body, drawings)


def _looks(outcome: Outcome, number: int, show: ChartSpec) -> Section:
    """Where the global models of the first seed look, in the same few images that carry the trigger."""
    runs = {_name(outcome, at, _fixed(show)): found[0] for at, found in _groups(outcome, show)}
    note, maps = "Nothing was measured yet.", []
    if runs:
        found = grad_cam(runs, carriers(next(iter(runs.values())), _IMAGES), triggered=True)
        note, maps = found.figures[0].note, [("", one.html()) for one in found.figures]
    body = fill("maps.html", package="holdfast.reproduction", note=note, maps=maps)
    return Section(f"Where the models look{_of(show)}", body)


def _fixed(show: ChartSpec) -> list[str]:
    """Axes of which a chart shows one label: its title says which, the lines need not."""
    return [axis for axis, labels in show.where.items() if len(as_labels(labels)) == 1]


def _of(show: ChartSpec) -> str:
    labels = " ".join(label_text(axis, as_labels(show.where[axis])[0]) for axis in _fixed(show))
    return f": {labels}" if labels else ""


def _groups(outcome: Outcome, show: ChartSpec) -> Iterable[tuple[AxisLabels, list[Run]]]:
    """The finished runs of every place that a chart shows."""
    for planned in outcome.grid.planned_runs:
        if planned.seed == 0 and matches(show.where, planned.at):
            runs = [run for run in outcome.runs[place("", planned.at)] if run is not None]
            if runs:
                yield planned.at, runs


def _name(outcome: Outcome, at: AxisLabels, without: Sequence[str]) -> str:
    """The labels that tell lines apart."""
    varied = [axis for axis, labels in outcome.ours.labels.items() if len(labels) > 1 and axis not in without]
    return " ".join(label_text(axis, at[axis]) for axis in varied if axis in at)
