"""Curves as PNG: what `charts.curves` draws for a page, drawn with Pillow."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from holdfast.report.axis import Axis, round_ticks, shorten, spread_out, tick_text
from holdfast.report.charts import Series
from holdfast.report.raster import LINES, RULE, SOFT, Pen, width_of

_WIDTH, _TOP, _BOTTOM, _EDGE, _HEIGHT = 760, 76, 50, 20, 420


def draw_curves(
    series: Sequence[Series], title: str, note: str, percent: bool, across: str, axis: Axis
) -> Image.Image:
    """Lines with their ranges as bands, each with its name at its end."""
    width = max(_WIDTH, 2 * _EDGE + width_of(title, 17), 2 * _EDGE + width_of(note, 12))
    pen = Pen(width, _HEIGHT)
    pen.text(_EDGE, 24, title, 17)
    pen.text(_EDGE, 46, note, 12, SOFT)
    left = _EDGE + 8 + max(width_of(tick_text(tick, percent), 11) for tick in axis.ticks)
    right = width - _EDGE - 14 - max(width_of(shorten(one.label, 22), 12) for one in series)
    rounds = [point[0] for one in series for point in one.points]
    first, last = min(rounds), max(rounds)
    floor = _HEIGHT - _BOTTOM

    def at(round: float, value: float) -> tuple[float, float]:
        return left + (round - first) / max(last - first, 1) * (right - left), floor - axis.share(value) * (
            floor - _TOP
        )

    for tick in axis.ticks:
        _, y = at(first, tick)
        pen.box(left, y - 0.5, right, y + 0.5, RULE)
        pen.text(left - 8, y, tick_text(tick, percent), 11, SOFT, "rm")
    for tick in round_ticks(first, last):
        pen.text(at(tick, axis.ticks[0])[0], floor + 14, str(tick), 11, SOFT, "mm")
    pen.text((left + right) / 2, _HEIGHT - 14, across, 11, SOFT, "mm")
    ends = spread_out(
        [at(*one.points[-1][:2])[1] if one.points else floor for one in series], 15, _TOP + 4, floor
    )
    for one, colour in zip(
        series, _colours(len(series)), strict=True
    ):  # bands first: no line is hidden by one
        if any(low < high for _, _, low, high in one.points):
            upper, lower = (
                [at(r, high) for r, _, _, high in one.points],
                [at(r, low) for r, _, low, _ in one.points],
            )
            pen.shape(upper + lower[::-1], colour, opacity=0.15)
    for one, colour, end in zip(series, _colours(len(series)), ends, strict=True):
        if one.points:
            pen.shape([at(r, middle) for r, middle, _, _ in one.points], colour, 2.2)
            x, y = at(*one.points[-1][:2])
            pen.dot(x, y, 3.5, colour)
            pen.text(x + 9, end, shorten(one.label, 22), 12, colour)
    return pen.image


def _colours(count: int) -> list[str]:
    return [LINES[place % len(LINES)] for place in range(count)]
