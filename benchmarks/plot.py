"""A plot with logarithmic axes as an SVG that stands by itself, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 620, 360, 70, 150, 36, 52
_APART = 30  # pixels between two numbers of the horizontal axis
COLOURS = ("#1668b8", "#c2410c", "#15803d", "#7e22ce", "#b45309", "#0e7490")


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[tuple[float, float]]


def log_plot(lines: Sequence[Line], across: str, up: str) -> str:
    """`up` is the title: what the vertical axis counts."""
    shown = [Line(line.label, [(x, y) for x, y in line.points if x > 0 and y > 0]) for line in lines]
    every = [point for line in shown for point in line.points]
    low_x, high_x = min(x for x, _ in every), max(x for x, _ in every)
    bottom, top = (
        math.floor(math.log10(min(y for _, y in every))),
        math.ceil(math.log10(max(y for _, y in every))),
    )
    top = max(top, bottom + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log(x) - math.log(low_x)) / max(math.log(high_x) - math.log(low_x), 1e-9)
        above = (math.log10(y) - bottom) / (top - bottom)
        return LEFT + right * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - above * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        f' font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/><text x="{LEFT}" y="20"'
        f' font-size="14" fill="#111">{escape(up)}</text>'
    ]
    for power in range(bottom, top + 1):
        _, y = place(low_x, 10.0**power)
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        out.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#333">{10.0**power:,g}</text>'
        )
    last = -math.inf
    for value in sorted({x for x, _ in every}):
        x, _ = place(value, 10.0**bottom)
        if x - last < _APART:
            continue
        last = x
        out.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle"'
            f' fill="#333">{_short(value)}</text>'
        )
    out.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle"'
        f' fill="#111">{escape(across)}</text>'
    )
    ends = _apart([place(*line.points[-1])[1] for line in shown])
    for number, line in enumerate(shown):
        colour, spots = COLOURS[number % len(COLOURS)], [place(x, y) for x, y in line.points]
        out.append(
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in spots)}" fill="none"'
            f' stroke="{colour}" stroke-width="2"/>'
        )
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        out.append(
            f'<text x="{spots[-1][0] + 8:.1f}" y="{ends[number] + 4:.1f}"'
            f' fill="{colour}">{escape(line.label)}</text>'
        )
    return "".join(out) + "</svg>\n"


def _short(value: float) -> str:
    return f"{value / 1e6:.3g}M" if value >= 1e6 else f"{value / 1e3:.3g}k" if value >= 1e3 else f"{value:g}"


def _apart(wanted: Sequence[float], gap: float = 14.0) -> list[float]:
    """The same heights, moved apart where labels would lie on each other."""
    order, out = sorted(range(len(wanted)), key=lambda place: wanted[place]), list(wanted)
    for before, after in zip(order, order[1:], strict=False):
        out[after] = max(out[after], out[before] + gap)
    return out
