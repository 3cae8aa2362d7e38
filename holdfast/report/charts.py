"""Charts of the page as SVG: curves over rounds, a dot for every client, heat maps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from holdfast.report import svg
from holdfast.report.axis import (
    Axis,
    PlotArea,
    Point,
    nice_ticks,
    round_step,
    shorten,
    spread_out,
    tick_text,
    worth_seeing,
)
from holdfast.report.numbers import percent
from holdfast.report.read_runs import Dot
from holdfast.report.row_chart import Row, dot, percentage, piles, row_chart, stacked, triangle, upright

Scale = Callable[[float], float]
COLOURS = 7  # classes c0 ... c6 of the page's style; further lines repeat them with other dashes
_DASHES = (0, 0, 0, 1, 1, 1, 2)
NAME_LETTERS = 30  # of a row's name beside a chart


@dataclass(frozen=True)
class Series:
    """A curve and its label."""

    label: str
    points: Sequence[Point]


def line_class(place: int) -> str:
    """Colour and dash of a line. With colour blindness some colours look alike; those have other dashes."""
    turn, colour = divmod(place, COLOURS)
    return f"c{colour} d{(_DASHES[colour] + 2 * turn) % 4}"


def swatch(place: int) -> Markup:
    """A sample of a line, for legends and tables."""
    line, dot = svg.path("line", "M1 6H25"), svg.element("circle", class_="dot", cx=13, cy=6, r=3.5)
    kind = f"swatch {line_class(place)}"
    return svg.element("svg", line, dot, class_=kind, viewBox="0 0 26 12", aria_hidden="true")


def curves(
    series: Sequence[Series],
    name: str,
    percent: bool,
    across: str = "round",
    axis: Axis | None = None,
    places: Sequence[int] = (),
    highlighted: int | None = None,
) -> Markup:
    """Means over rounds (or another whole number) as lines, the range over seeds as a band, labels at the end
    of the lines. `places` are the numbers of their colours. Lines from number `highlighted` on are thin and
    grey until the reader chooses them."""
    every = [point for one in series for point in one.points]
    if not every:
        return svg.element("p", "Nothing was evaluated yet.", class_="note")
    width, height = 560, 340
    right = width - 24 - 7.5 * max(len(shorten(one.label, 18)) for one in series)
    area = PlotArea(48, 14, right, height - 40)
    first, last = min(p[0] for p in every), max(p[0] for p in every)
    axis = axis or Axis(nice_ticks(*worth_seeing(every, percent)))
    places = places or range(len(series))
    muted = [highlighted is not None and place >= highlighted for place in places]
    clip = f"clip-{re.sub('[^A-Za-z0-9]+', '-', name)}"

    def x(round: float) -> float:
        return area.round_x(round, first, last)

    def y(value: float) -> float:
        """Values far outside the chart are moved closer: a browser cannot read numbers of 50 digits."""
        return area.y(min(max(axis.share(value), -2.0), 3.0))

    box = svg.element("rect", x=0, y=area.top - 4, width=width, height=area.bottom - area.top + 8)
    out = [svg.element("clipPath", box, id=clip)]
    out += area.value_axis(axis, lambda tick: tick_text(tick, percent))
    out += area.labels_below(area.rounds(first, last))
    out.append(area.name_below(across))
    wanted = [min(max(y(one.points[-1][1]), area.top), area.bottom) if one.points else 0.0 for one in series]
    named = [i for i, quiet in enumerate(muted) if not quiet]
    ends = list(wanted)
    apart = spread_out([wanted[i] for i in named], 14, area.top + 4, area.bottom)
    for i, end in zip(named, apart, strict=True):
        ends[i] = end
    for i in sorted(range(len(series)), key=lambda i: not muted[i]):  # grey lines first: they hide no other
        kind = f"{line_class(places[i])}{' muted' if muted[i] else ''}"
        out.append(_curve(series[i], places[i], kind, x, y, ends[i], f"url(#{clip})"))
    out.append(svg.path("cursor", f"M0 {area.top}V{area.bottom}", visibility="hidden"))
    return svg.element(
        "svg",
        *out,
        class_="chart",
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"{name} by {across}",
        data_x=f"{area.left},{area.right},{first},{last}",
        data_percent=int(percent),
    )


def _curve(one: Series, place: int, kind: str, x: Scale, y: Scale, end: float, clip: str) -> Markup:
    if not one.points:
        return Markup()
    line = "M" + "L".join(f"{x(r):.1f} {y(mean):.1f}" for r, mean, _, _ in one.points)
    drawn = [svg.path("line", line)]
    if any(low < high for _, _, low, high in one.points):
        upper = [f"{x(r):.1f} {y(high):.1f}" for r, _, _, high in one.points]
        lower = [f"{x(r):.1f} {y(low):.1f}" for r, _, low, _ in reversed(one.points)]
        drawn.insert(0, svg.path("band", f"M{'L'.join(upper + lower)}Z"))
    r, mean = one.points[-1][:2]
    at = {"cx": f"{x(r):.1f}", "cy": f"{y(mean):.1f}", "r": 3.5}
    return svg.group(
        kind,
        svg.element("g", *drawn, clip_path=clip),
        svg.element("circle", clip_path=clip, class_="dot", **at),
        svg.text("label", x(r) + 9, end + 4, shorten(one.label, 18)),
        data_line=place,
    )


def strips(
    rows: Sequence[tuple[str, Sequence[Dot], float | None, float | None]],
    most: int = 600,
    places: Sequence[int] = (),
) -> Markup:
    """A row per method: every client is a dot at its accuracy, with marks at the mean and the worst tenth."""
    high = 72 if len(rows) <= 6 else 46
    lowest = min((dot.accuracy for _, dots, _, _ in rows for dot in dots), default=0.0)
    axis = Axis(nice_ticks(min(lowest, 0.95), 1.0))
    drawn = []
    for place, (label, dots, mean, worst) in zip(places or range(len(rows)), rows, strict=True):
        marks = _clients(
            sorted(thin_out(dots, most), key=lambda d: (d.accuracy, d.client, d.seed)), axis, high
        )
        for value, kind, word in ((mean, "mean", "mean"), (worst, "worst", "worst 10 %")):
            if value is not None:
                share = max(axis.share(value), 0.0)
                marks.append(upright(kind, share, 8, high - 8, svg.title(f"{word}: {percent(value)}")))
        drawn.append(Row(line_class(place), place, label, marks))
    ticks = [(axis.share(tick), tick_text(tick, True)) for tick in axis.ticks]
    return row_chart(drawn, high, ticks, "Accuracy of every client, a row per method")


def _clients(dots: Sequence[Dot], axis: Axis, high: int) -> list[Markup]:
    """Their dots; those of nearly equal accuracy are piled up and down around the middle of the row."""
    out = []
    shares = [axis.share(dot.accuracy) for dot in dots]
    for pile in piles(shares):
        up = stacked(len(pile), high - 14, 7.4)
        out += [_client(dots[i], shares[i], high / 2 + up(n)) for n, i in enumerate(pile)]
        if len(pile) > 12:  # too many to count by eye
            at = {"x": percentage(shares[pile[0]]), "dx": 9, "y": high / 2 + 4}
            out.append(svg.element("text", f"×{len(pile)}", class_="label", **at))
    return out


def _client(one: Dot, share: float, y: float) -> Markup:
    """One client's dot. An attacker is a hollow triangle, because no mean counts it."""
    about = f"client {one.client}, seed {one.seed}: {percent(one.accuracy)} of {one.samples}"
    if one.malicious:
        return triangle("client foe", share, y, f"attacker, {about}")
    return dot("client", share, y, about)


def heat_map(
    counts: Sequence[Sequence[float]],
    names: Sequence[str],
    what: str = "Training samples",
    first: int = 0,
    most: float = 0,
    heads: Sequence[str] = (),
    words: tuple[str, str, str] = ("client", "class", "samples"),
    texts: Sequence[Sequence[str]] = (),
) -> Markup:
    """Clients across, classes down, darker for more samples; numbers where there is room. `first` is the
    number of the first client shown, and maps with the same `most` have the same shades. For other things
    than clients and classes give `heads`, `words` (what is across, down and inside) and `texts` in place of
    the numbers."""
    clients, classes = len(counts), len(names)
    heads = heads or [str(first + place) for place in range(clients)]
    longest = max(len(shorten(name, 16)) for name in names)
    width, left, top = 1120, max(60, 18 + 7 * longest, 18 + 6 * len(words[0])), 22
    side = min(52.0, (width - left - 12) / max(clients, 1))
    tall = min(side if side >= 14 else 22.0, 30.0, max(8.0, 1200 / classes))
    below = top + tall * classes
    short = [shorten(head, 16) for head in heads]
    longest = max(map(len, short), default=1)
    slanted = 7.5 * longest > side and not all(head.isdecimal() for head in short)
    most = most or max((count for row in counts for count in row), default=0) or 1
    letters = max((len(text) for row in texts for text in row), default=len(str(most)))
    texts = texts or [[str(count) for count in row] for row in counts]
    roomy = side >= 7 * letters + 4 and tall >= 14
    gap = 1.5 if side >= 8 else 0.5
    box = {"width": f"{side - gap:.1f}", "height": f"{tall - gap:.1f}", "rx": f"{min(2, side / 6):.1f}"}
    out = _empty_cells(f"cells-{first}", (left, top), (side, tall), (clients, classes), box)
    for place, row in enumerate(counts):
        for kind, count in enumerate(row):
            if not count:
                continue
            share = math.sqrt(count / most)  # a square root keeps small counts visible
            at, down = left + side * place, top + tall * kind
            about = f"{words[0]} {heads[place]}, {words[1]} {names[kind]}: {texts[place][kind]} {words[2]}"
            where = {"x": f"{at:.1f}", "y": f"{down:.1f}", **box}
            tip = svg.title(about.rstrip())
            out.append(svg.element("rect", tip, class_="heat", fill_opacity=f"{share:.2f}", **where))
            if roomy:
                shade = "bright" if share > 0.6 else ""
                middle = at + (side - gap) / 2, down + tall / 2 + 3.5
                out.append(svg.text(f"count {shade}", *middle, texts[place][kind]))
    for kind in range(0, classes, round_step(12 / tall)):
        out.append(svg.text("tick end", left - 10, top + tall * (kind + 0.5) + 3.5, shorten(names[kind], 16)))
    for place in range(0, clients, round_step((15.0 if slanted else 8 * longest) / side)):
        under = left + side * (place + 0.5), below + 15
        out.append(
            _slanted(*under, short[place]) if slanted else svg.text("tick middle", *under, short[place])
        )
    out.append(svg.text("tick end", left - 10, 12, words[1]))
    out.append(svg.text("tick end", left - 16, below + 15, words[0]))
    label = f"{what} of every {words[0]} by {words[1]}"
    foot = 22 + (5 * longest if slanted else 0)
    return svg.fitted(left + side * clients + 12, below + foot, label, out)


def _slanted(x: float, y: float, words: str) -> Markup:
    """A name below a narrow column."""
    where = {"x": f"{x:.1f}", "y": f"{y:.1f}", "transform": f"rotate(-45 {x:.1f} {y:.1f})"}
    return svg.element("text", words, class_="tick end", **where)


def _empty_cells(
    name: str,
    corner: tuple[float, float],
    size: tuple[float, float],
    many: tuple[int, int],
    box: dict[str, str],
) -> list[Markup]:
    """The cells of a map in one pattern, so that empty ones take no room on the page."""
    (left, top), (side, tall) = corner, size
    cell = svg.element("rect", class_="cell", **box)
    place = {"x": left, "y": top}
    pattern = svg.element(
        "pattern",
        cell,
        id=name,
        **place,
        width=f"{side:.3f}",
        height=f"{tall:.3f}",
        patternUnits="userSpaceOnUse",
    )
    whole = {"width": f"{side * many[0]:.1f}", "height": f"{tall * many[1]:.1f}"}
    return [pattern, svg.element("rect", fill=f"url(#{name})", **place, **whole)]


def thin_out(dots: Sequence[Dot], most: int) -> list[Dot]:
    """Every k-th dot in order of accuracy, the worst one always among them."""
    ordered = sorted(dots, key=lambda d: d.accuracy)
    return ordered[:: max(1, math.ceil(len(ordered) / most))]
