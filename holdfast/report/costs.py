"""What the runs cost: bytes that travelled and seconds that were spent, as bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from holdfast.report import plots, svg
from holdfast.report.axis import shorten
from holdfast.report.charts import NAME_LETTERS
from holdfast.report.markup import Section, fill
from holdfast.report.numbers import amount, duration
from holdfast.report.read_runs import SettingRuns

_PARTS: dict[str, tuple[dict[str, str], Callable[[float], str]]] = {
    "Bytes, all clients and rounds": ({"bytes/up": "to the server", "bytes/down": "to the clients"}, amount),
    "Seconds": (
        {"seconds/client": "training", "seconds/server": "server", "seconds/evaluate": "evaluation"},
        duration,
    ),
}


def costs(lines: Sequence[SettingRuns]) -> Section | None:
    """Bars that compare several settings; a single run has its costs in the table of figures."""
    if len(lines) < 2:
        return None
    charts, drawings = [], []
    for title, (names, write) in _PARTS.items():
        rows = [(line.label, [line.mean(metric) or 0.0 for metric in names]) for line in lines]
        if any(sum(values) for _, values in rows):
            words = list(names.values())
            charts.append((title, words, _bars(rows, title, words, write)))
            drawings.append(plots.bars(rows, title, words, write))
    if not charts:
        return None
    several_seeds = any(line.seeds > 1 for line in lines)
    body = fill("sections/costs.html", charts=charts, several_seeds=several_seeds, rows=len(lines))
    return Section("Cost", body, drawings)


def _bars(
    rows: Sequence[tuple[str, Sequence[float]]],
    title: str,
    words: Sequence[str],
    write: Callable[[float], str],
) -> Markup:
    """A row per line, its parts one after the other, their sum in words at the end."""
    width, right, row = 560, 76, 24
    left = 14 + round(8.0 * max(len(shorten(label, NAME_LETTERS)) for label, _ in rows))
    most = max(sum(values) for _, values in rows)
    out = []
    for down, (label, values) in enumerate(rows):
        y, at = row * down + 4, float(left)
        out.append(svg.text("name", 0, y + 13, shorten(label, NAME_LETTERS)))
        for place, (word, value) in enumerate(zip(words, values, strict=True)):
            wide = value / most * (width - left - right)
            box = {"x": f"{at:.1f}", "y": y, "width": f"{wide:.1f}", "height": 17}
            about = svg.title(f"{label}, {word}: {write(value)}")
            out.append(svg.element("rect", about, class_=f"bar{place}", **box))
            at += wide
        out.append(svg.text("tick", at + 7, y + 13, write(sum(values))))
    return svg.chart("chart bars", width, row * len(rows) + 4, f"{title} of every setting", out)
