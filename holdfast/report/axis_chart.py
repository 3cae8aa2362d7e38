"""A chart of one figure along an axis of a study: its labels across, a line for every combination of the
other labels."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from holdfast.report.charts import line_class, nice_ticks, shorten, spread_out

Dots = Sequence[tuple[int, float, float, float]]
"""Place of the label, mean, lowest, highest."""


def along(lines: Sequence[tuple[str, Dots]], labels: Sequence[str], name: str, across: str) -> str:
    every = [dot for _, dots in lines for dot in dots]
    if not every:
        return '<p class="note">Nothing was measured yet.</p>'
    width, height, left, top, bottom = 560, 340, 52, 14, 40
    right = 24 + 7.5 * max(len(shorten(label, 18)) for label, _ in lines)
    ticks = nice_ticks(min(dot[2] for dot in every), max(dot[3] for dot in every))

    def x(place: int) -> float:
        return left + 14 + place / max(len(labels) - 1, 1) * (width - left - right - 28)

    def y(value: float) -> float:
        return top + (1 - (value - ticks[0]) / (ticks[-1] - ticks[0])) * (height - top - bottom)

    out = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)} by'
        f' {escape(across)}">'
    ]
    for tick in ticks:
        out.append(f'<path class="grid" d="M{left} {y(tick):.1f}H{width - right:.1f}"/>')
        out.append(f'<text class="tick end" x="{left - 8}" y="{y(tick) + 4:.1f}">{tick:.4g}</text>')
    for place, label in enumerate(labels):
        out.append(
            f'<text class="tick middle" x="{x(place):.1f}"'
            f' y="{height - bottom + 18}">{escape(shorten(label, 12))}</text>'
        )
    out.append(
        f'<text class="tick middle" x="{(left + width - right) / 2:.1f}"'
        f' y="{height - 4}">{escape(across)}</text>'
    )
    ends = spread_out([y(dots[-1][1]) if dots else 0.0 for _, dots in lines], 14, top + 4, height - bottom)
    for number, (label, dots) in enumerate(lines):
        if not dots:
            continue
        path = "M" + "L".join(f"{x(place):.1f} {y(mean):.1f}" for place, mean, _, _ in dots)
        out.append(f'<g class="{line_class(number)}"><path class="line" d="{path}"/>')
        for place, mean, low, high in dots:
            about = escape(f"{label}, {labels[place]}: {mean:.4g}")
            seeds = f'd="M{x(place):.1f} {y(low):.1f}V{y(high):.1f}"'
            bar = (
                f'<path class="line" style="stroke-dasharray:none" stroke-opacity=".5" {seeds}/>'
                if low < high
                else ""
            )
            out.append(
                f'{bar}<circle class="dot" cx="{x(place):.1f}" cy="{y(mean):.1f}"'
                f' r="3.5"><title>{about}</title></circle>'
            )
        last = x(dots[-1][0])
        out.append(
            f'<text class="label" x="{last + 9:.1f}"'
            f' y="{ends[number] + 4:.1f}">{escape(shorten(label, 18))}</text></g>'
        )
    return "".join(out) + "</svg>"
