"""What the runs came to over the rounds: a chart for each attack they faced, in which a setting has the same
colour throughout."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from holdfast.report import plots
from holdfast.report.axis import Axis, Point, nice_ticks, worth_seeing
from holdfast.report.charts import Series, curves, swatch
from holdfast.report.drawing import Drawing
from holdfast.report.markup import Section, fill, script_json
from holdfast.report.read_runs import SettingRuns, asked
from holdfast.report.settings_by_attack import BENIGN, HIGHLIGHTED, Faced, SettingsByAttack

CURVES = {
    "accuracy": "Accuracy",
    "loss": "Loss",
    "macro_f1": "Macro-F1",
    "balanced_accuracy": "Balanced accuracy",
    "auc": "AUC",
}
MOST_POINTS, ON_A_PAGE = (
    400,
    40_000,
)  # of a curve, for a chart has not many more dots across; and of all curves, for its size


def charted(lines: Sequence[SettingRuns]) -> dict[str, str]:
    """What has a curve: accuracy and loss, and of what the runs were asked for that which was defined."""
    more = [metric for metric in asked(lines) if any(line.curve(metric) for line in lines)]
    return {metric: CURVES[metric] for metric in ("accuracy", "loss", *more)}


def over_rounds(lines: Sequence[SettingRuns], by_attack: SettingsByAttack) -> Section:
    """All metrics side by side where all settings faced the same attack; else accuracy attack by attack, and
    the other metrics folded away."""
    metrics = {
        metric: (name, _charts(metric, name, lines, by_attack)) for metric, name in charted(lines).items()
    }
    body = fill(
        "sections/over_rounds.html",
        bands=any(line.seeds > 1 for line in lines),
        cut=any(_is_cut(lines, metric) for metric in metrics),
        keys=[(swatch(place), setting) for place, setting in enumerate(by_attack.settings)],
        highlighted=HIGHLIGHTED if by_attack.many else None,
        several=len(by_attack.panels) > 1,
        metrics=[(metric, name, drawn) for metric, (name, drawn) in metrics.items()],
    )
    drawings = [drawing for _, drawn in metrics.values() for _, _, drawing in drawn]
    return Section("Over the rounds", body, drawings)


def _charts(
    metric: str, name: str, lines: Sequence[SettingRuns], by_attack: SettingsByAttack
) -> list[tuple[str, Markup, Drawing]]:
    """Headings and charts of one metric, and the charts as figures for papers. They share their axis, so they
    can be compared by eye."""
    points, most = [point for line in lines for point in line.curve(metric)], _room(lines)
    axis = Axis(nice_ticks(*worth_seeing(points, metric != "loss"))) if points else None
    out = []
    for title, faced in by_attack.panels:
        heading = (
            name
            if len(by_attack.panels) == 1
            else f"{name}, {title}"
            if title.endswith(BENIGN)
            else f"{name} under {title}"
        )
        series = [Series(one.setting, thinned(one.line.curve(metric), most)) for one in faced]
        places, percent = [by_attack.place(one.line) for one in faced], metric != "loss"
        highlighted = HIGHLIGHTED if by_attack.many else None
        chart = curves(series, heading, percent, axis=axis, places=places, highlighted=highlighted)
        lines_of = [(one.label, one.points) for one in series]
        out.append((heading, chart, plots.curves(lines_of, heading, percent, "round", axis, places)))
    return out


def pointed_at(lines: Sequence[SettingRuns], by_attack: SettingsByAttack) -> Markup:
    """The values that a pointer reads, by chart."""
    out, most = {}, _room(lines)
    for metric in charted(lines):
        for place, (_, faced) in enumerate(by_attack.panels):
            out[f"{metric}/{place}"] = [
                _values(one, metric, by_attack.place(one.line), most) for one in faced
            ]
    return script_json(out)


def _values(one: Faced, metric: str, place: int, most: int) -> dict[str, object]:
    points = thinned(one.line.curve(metric), most)
    return {
        "line": place,
        "label": one.setting,
        "rounds": [p[0] for p in points],
        "values": [float(f"{p[1]:.4g}") for p in points],
    }


def _room(lines: Sequence[SettingRuns]) -> int:
    """How many points a curve of this page may have."""
    return max(60, min(MOST_POINTS, ON_A_PAGE // (len(lines) * len(charted(lines)))))


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Every k-th, counted from the last, which is the one that all tables show."""
    step = -(-len(points) // most) or 1
    return list(points[::-1][::step])[::-1]


def _is_cut(lines: Sequence[SettingRuns], metric: str) -> bool:
    points = [point for line in lines for point in line.curve(metric)]
    return bool(points) and worth_seeing(points, metric != "loss") != (
        min(p[2] for p in points),
        max(p[3] for p in points),
    )
