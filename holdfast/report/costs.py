"""What the runs cost: bytes that travelled and seconds that were spent, as bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from holdfast.report.charts import NAME_LETTERS, shorten
from holdfast.report.read_runs import Line
from holdfast.report.sections import folded
from holdfast.report.table import amount, duration

_PARTS: dict[str, tuple[dict[str, str], Callable[[float], str]]] = {
    "Bytes, all clients and rounds": ({"bytes/up": "to the server", "bytes/down": "to the clients"}, amount),
    "Seconds": (
        {"seconds/client": "training", "seconds/server": "server", "seconds/evaluate": "evaluation"},
        duration,
    ),
}


def costs(lines: Sequence[Line]) -> str:
    """For a comparison; of a single run, the table says it."""
    if len(lines) < 2:
        return ""
    charts = []
    for title, (names, write) in _PARTS.items():
        rows = [(line.label, [line.mean(metric) or 0.0 for metric in names]) for line in lines]
        if not any(sum(values) for _, values in rows):
            continue
        told = "".join(
            f'<span class="patch p{place}"></span>{word}' for place, word in enumerate(names.values())
        )
        bars = _bars(rows, title, list(names.values()), write)
        charts.append(
            f'<div><h3>{title}</h3><p class="note">{told}</p><div class="scroll">{bars}</div></div>'
        )
    if not charts:
        return ""
    words = ["Means over seeds."] if any(line.seeds > 1 for line in lines) else []
    body = f'<div class="two">{"".join(charts)}</div>'
    words.append("Runs that are played together share their time, so it does not rank methods.")
    return (
        "<section><h2>What it cost</h2><p"
        f' class="note">{" ".join(words)}</p>{folded(body, len(lines))}</section>'
    )


def _bars(
    rows: Sequence[tuple[str, Sequence[float]]],
    title: str,
    words: Sequence[str],
    write: Callable[[float], str],
) -> str:
    """A row per line, its parts one after the other, their sum in words at the end."""
    width, right, row = 560, 76, 24
    left = 14 + round(8.0 * max(len(shorten(label, NAME_LETTERS)) for label, _ in rows))
    most = max(sum(values) for _, values in rows)
    out = [
        f'<svg class="chart bars" viewBox="0 0 {width} {row * len(rows) + 4}" role="img"'
        f' aria-label="{escape(title)} of every setting">'
    ]
    for down, (label, values) in enumerate(rows):
        y, at = row * down + 4, float(left)
        out.append(f'<text class="name" x="0" y="{y + 13}">{escape(shorten(label, NAME_LETTERS))}</text>')
        for place, (word, value) in enumerate(zip(words, values, strict=True)):
            wide = value / most * (width - left - right)
            about = escape(f"{label}, {word}: {write(value)}")
            out.append(
                f'<rect class="bar{place}" x="{at:.1f}" y="{y}" width="{wide:.1f}"'
                f' height="17"><title>{about}</title></rect>'
            )
            at += wide
        out.append(f'<text class="tick" x="{at + 7:.1f}" y="{y + 13}">{write(sum(values))}</text>')
    return "".join(out) + "</svg>"
