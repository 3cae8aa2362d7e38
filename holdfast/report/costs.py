"""What the runs cost: bytes that travelled and seconds that were spent, as bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from holdfast.report import plots, svg
from holdfast.report.markup import Section, breakable, fill
from holdfast.report.numbers import amount, duration
from holdfast.report.read_runs import SettingRuns
from holdfast.report.row_chart import percentage

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
    most = max(sum(values) for _, values in rows)
    out = []
    for label, values in rows:
        parts = [
            svg.element(
                "i",
                "",
                class_=f"bar{place}",
                style=f"width:{percentage(value / most)}",
                title=f"{label}, {word}: {write(value)}",
            )
            for place, (word, value) in enumerate(zip(words, values, strict=True))
            if value
        ]
        name = svg.element("span", breakable(label), class_="name")
        bar = svg.element(
            "div", svg.element("div", *parts, class_="bar"), svg.element("b", write(sum(values)))
        )
        out.append(svg.element("div", name, bar, class_="lane"))
    return svg.element("div", *out, class_="rows bars", role="img", aria_label=f"{title} of every setting")
