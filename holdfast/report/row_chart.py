"""Charts with a row for each setting: its name, and marks on one axis that all rows share. Places on the axis
are percentages, so a row fills any width while its text and dots keep their size. On a narrow screen the name
is above its row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from holdfast.report import svg
from holdfast.report.markup import breakable


@dataclass(frozen=True)
class Row:
    """One setting: the class of its colours, the number of its line, its name and what is drawn."""

    kind: str
    place: int | None
    name: str
    marks: Sequence[Markup]


def row_chart(
    rows: Sequence[Row], high: int, ticks: Sequence[tuple[float, str]], label: str, across: str = ""
) -> Markup:
    """The rows, each `high` pixels, above an axis with ticks at these shares of its length. `label` is what a
    screen reader says."""
    grid = [upright("grid", share, 0, high) for share, _ in ticks]
    drawn = [
        svg.element(
            "div",
            svg.element("span", breakable(row.name), class_="name", title=row.name),
            svg.element("svg", *grid, *row.marks, class_="strip", height=high),
            class_=f"lane {row.kind}",
            data_line=row.place,
        )
        for row in rows
    ]
    words = [
        svg.element("text", text, class_="tick middle", x=percentage(share), y=14) for share, text in ticks
    ]
    if across:
        words.append(svg.element("text", across, class_="tick middle", x="50%", y=31))
    axis = svg.element("svg", *words, class_="strip", height=36 if across else 18)
    drawn.append(svg.element("div", svg.element("span", "", class_="name"), axis, class_="lane axis"))
    return svg.element("div", *drawn, class_="rows chart", role="img", aria_label=label)


def percentage(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def upright(kind: str, share: float, top: float, bottom: float, *children: object) -> Markup:
    """A vertical line at a share of the axis."""
    x = percentage(share)
    return svg.element("line", *children, class_=kind, x1=x, x2=x, y1=f"{top:g}", y2=f"{bottom:g}")


def dot(kind: str, share: float, y: float, about: str, radius: float = 3.6) -> Markup:
    return svg.element("circle", svg.title(about), class_=kind, cx=percentage(share), cy=f"{y:.1f}", r=radius)


def triangle(kind: str, share: float, y: float, about: str) -> Markup:
    """A triangle at a share of the axis; a path has no percentages, so it is in a drawing of its own."""
    shape = svg.path(kind, "M0-4l4 7h-8z", svg.title(about))
    return svg.element("svg", shape, class_="at", x=percentage(share), y=f"{y:.1f}")


def piles(shares: Sequence[float], wide: float = 850, apart: float = 7.0) -> list[list[int]]:
    """The numbers of those that would cover each other on a row of usual width, in order."""
    found: dict[int, list[int]] = {}
    for place, share in enumerate(shares):
        found.setdefault(round(share * wide / apart), []).append(place)
    return list(found.values())


def stacked(pile: int, high: float, most: float) -> Callable[[int], float]:
    """How far above or below the middle of its row the i-th of a pile lies."""
    step = min(most, high / max(pile, 1))
    return lambda i: (i - (pile - 1) / 2) * step
