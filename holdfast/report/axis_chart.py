"""A chart of one figure along an axis of a study: the labels of the axis across, and a line for every
combination of the other labels."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from holdfast.report import svg
from holdfast.report.axis import Axis, PlotArea, nice_ticks, shorten, spread_out
from holdfast.report.charts import line_class

Dots = Sequence[tuple[int, float, float, float]]
"""Number of the label, mean, lowest, highest."""


def along(lines: Sequence[tuple[str, Dots]], labels: Sequence[str], name: str, across: str) -> Markup:
    """Draw the lines; a bar at a dot reaches from the lowest to the highest seed."""
    every = [dot for _, dots in lines for dot in dots]
    if not every:
        return svg.element("p", "Nothing was measured yet.", class_="note")
    width, height = 560, 340
    right = width - 24 - 7.5 * max(len(shorten(label, 18)) for label, _ in lines)
    area = PlotArea(52, 14, right, height - 40)
    axis = Axis(nice_ticks(min(dot[2] for dot in every), max(dot[3] for dot in every)))

    def x(place: int) -> float:
        return area.left + 14 + place / max(len(labels) - 1, 1) * (area.right - area.left - 28)

    def y(value: float) -> float:
        return area.y(axis.share(value))

    out = area.value_axis(axis, "{:.4g}".format)
    out += area.labels_below((x(place), shorten(label, 12)) for place, label in enumerate(labels))
    out.append(area.name_below(across))
    ends = spread_out([y(dots[-1][1]) if dots else 0.0 for _, dots in lines], 14, area.top + 4, area.bottom)
    for number, (label, dots) in enumerate(lines):
        if not dots:
            continue
        path = "M" + "L".join(f"{x(place):.1f} {y(mean):.1f}" for place, mean, _, _ in dots)
        drawn = [svg.path("line", path)]
        for place, mean, low, high in dots:
            if low < high:
                bar = f"M{x(place):.1f} {y(low):.1f}V{y(high):.1f}"
                drawn.append(svg.path("line", bar, style="stroke-dasharray:none", stroke_opacity=".5"))
            at = {"cx": f"{x(place):.1f}", "cy": f"{y(mean):.1f}", "r": 3.5}
            about = svg.title(f"{label}, {labels[place]}: {mean:.4g}")
            drawn.append(svg.element("circle", about, class_="dot", **at))
        drawn.append(svg.text("label", x(dots[-1][0]) + 9, ends[number] + 4, shorten(label, 18)))
        out.append(svg.group(line_class(number), *drawn))
    return svg.chart("chart", width, height, f"{name} by {across}", out)
