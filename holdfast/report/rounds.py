"""What the runs came to over the rounds: a chart for each attack they faced, in which a setting has the same
colour throughout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from holdfast.report.charts import Axis, Point, Series, curves, nice_ticks, swatch, worth_seeing
from holdfast.report.read_runs import Line, asked
from holdfast.report.settings_by_attack import BENIGN, HIGHLIGHTED, Crossing, Faced

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


def charted(lines: Sequence[Line]) -> dict[str, str]:
    """What has a curve: accuracy and loss, and of what the runs were asked for that which was defined."""
    more = [metric for metric in asked(lines) if any(line.curve(metric) for line in lines)]
    return {metric: CURVES[metric] for metric in ("accuracy", "loss", *more)}


def over_rounds(lines: Sequence[Line], crossing: Crossing) -> str:
    """All metrics side by side where everybody faced the same; else accuracy attack by attack, and the other
    metrics folded away."""
    cut = (
        " What is far off the other values lies outside the charts."
        if any(_is_cut(lines, metric) for metric in charted(lines))
        else ""
    )
    band = (
        " Bands reach from the lowest to the highest seed." if any(line.seeds > 1 for line in lines) else ""
    )
    how = " Point at a chart, or reach it by Tab and press the arrow keys, to read a round."
    several = len(crossing.panels) > 1
    parts = []
    for metric, name in charted(lines).items():
        drawn = _charts(metric, name, lines, crossing)
        if not several:
            parts.append(drawn)
        elif metric == "accuracy":
            parts.append(f'<div class="two">{drawn}</div>')
        else:
            parts.append(
                f"<details><summary>{name}, attack by attack</summary><div"
                f' class="two">{drawn}</div></details>'
            )
    body = "".join(parts) if several else f'<div class="two">{"".join(parts)}</div>'
    return (
        "<section><h2>Over the rounds</h2>"
        '<p class="note">Of the model each method deploys, on the clients\' test'
        f" samples.{band}{cut}{how}</p>"
        f"{_keys(crossing)}{body}</section>"
    )


def _charts(metric: str, name: str, lines: Sequence[Line], crossing: Crossing) -> str:
    """Charts of one metric share their axis, so that they can be compared by eye."""
    points, most = [point for line in lines for point in line.curve(metric)], _room(lines)
    axis = Axis(nice_ticks(*worth_seeing(points, metric != "loss"))) if points else None
    out = []
    for place, (title, faced) in enumerate(crossing.panels):
        heading = (
            name
            if len(crossing.panels) == 1
            else f"{name}, {title}"
            if title.endswith(BENIGN)
            else f"{name} under {title}"
        )
        chart = curves(
            [Series(one.setting, thinned(one.line.curve(metric), most)) for one in faced],
            heading,
            metric != "loss",
            axis=axis,
            places=[crossing.place(one.line) for one in faced],
            highlighted=HIGHLIGHTED if crossing.many else None,
        )
        out.append(f'<div data-chart="{metric}/{place}"><h3>{escape(heading)}</h3>{chart}</div>')
    return "".join(out)


def pointed_at(lines: Sequence[Line], crossing: Crossing) -> str:
    """The values that a pointer reads, by chart. `<` is written as an escape, so that no label can end the
    script element."""
    out, most = {}, _room(lines)
    for metric in charted(lines):
        for place, (_, faced) in enumerate(crossing.panels):
            out[f"{metric}/{place}"] = [_values(one, metric, crossing.place(one.line), most) for one in faced]
    return json.dumps(out, separators=(",", ":")).replace("<", "\\u003c")


def _values(one: Faced, metric: str, place: int, most: int) -> dict[str, object]:
    points = thinned(one.line.curve(metric), most)
    return {
        "line": place,
        "label": one.setting,
        "rounds": [p[0] for p in points],
        "values": [float(f"{p[1]:.4g}") for p in points],
    }


def _room(lines: Sequence[Line]) -> int:
    """How many points a curve of this page may have."""
    return max(60, min(MOST_POINTS, ON_A_PAGE // (len(lines) * len(charted(lines)))))


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Every k-th, counted from the last, which is the one that all tables show."""
    step = -(-len(points) // most) or 1
    return list(points[::-1][::step])[::-1]


def _is_cut(lines: Sequence[Line], metric: str) -> bool:
    points = [point for line in lines for point in line.curve(metric)]
    return bool(points) and worth_seeing(points, metric != "loss") != (
        min(p[2] for p in points),
        max(p[3] for p in points),
    )


def _keys(crossing: Crossing) -> str:
    """The legend, which is also what chooses lines. Of more than can be told apart, those that hold best are
    chosen at first."""
    if len(crossing.settings) < 2:
        return ""
    buttons = [
        '<button type="button" class="key"'
        f' aria-pressed="{"true" if not crossing.many or place < HIGHLIGHTED else "false"}"'
        f' data-key="{place}">{swatch(place)}{escape(setting)}</button>'
        for place, setting in enumerate(crossing.settings)
    ]
    if crossing.many:
        buttons += [
            '<button type="button" class="key plain" data-all="true">all</button>',
            '<button type="button" class="key plain" data-all="false">none</button>',
        ]
    many = ' data-many="1"' if crossing.many else ""
    return f'<div class="keys" role="group" aria-label="Lines to show"{many}>{"".join(buttons)}</div>'
