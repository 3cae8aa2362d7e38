"""Charts as SVG text: no library, no network; colours come from the page's style, so that they follow light,
dark and print."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from holdfast.report.read_runs import Dot

Scale = Callable[[float], float]
Point = tuple[int, float, float, float]  # round, mean, lowest, highest
COLOURS = 7  # classes c0 ... c6 of the page's style; further lines repeat them with other dashes
_DASHES = (0, 0, 0, 1, 1, 1, 2)
_FAR_OFF = 10  # times the median of all that a chart shows of a loss


@dataclass(frozen=True)
class Series:
    label: str
    points: Sequence[Point]


def line_class(place: int) -> str:
    """Colour and dash together tell lines apart. To some eyes the colours are only three, blue, yellow and
    grey: those that look alike have other dashes."""
    turn, colour = divmod(place, COLOURS)
    return f"c{colour} d{(_DASHES[colour] + 2 * turn) % 4}"


def swatch(place: int) -> str:
    """What a line of this colour looks like, for legends and tables."""
    return (
        f'<svg class="swatch {line_class(place)}" viewBox="0 0 26 12" aria-hidden="true"><path class="line"'
        ' d="M1 6H25"/><circle class="dot" cx="13" cy="6" r="3.5"/></svg>'
    )


@dataclass(frozen=True)
class Axis:
    """Where values stand between the bottom (0) and the top (1) of a chart, and which of them are written
    beside it."""

    ticks: Sequence[float]
    log: bool = False

    def share(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        if self.log:
            return (math.log10(max(value, low)) - math.log10(low)) / (math.log10(high) - math.log10(low))
        return (value - low) / (high - low)

    @staticmethod
    def over(points: Sequence[Point]) -> Axis:
        """All that there is: by powers of ten where most of it would otherwise lie on the floor, and from 0
        on where the values are small against the largest, or nearly the same."""
        low, high = min(p[2] for p in points), max(p[3] for p in points)
        if low > 0 and high > 200 * low:
            exponents = range(math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9) + 1)
            return Axis([10.0**e for e in exponents], log=True)
        return Axis(nice_ticks(min(low, 0.0) if low < 0.3 * high or high - low < 0.2 * high else low, high))


def curves(
    series: Sequence[Series],
    name: str,
    percent: bool,
    across: str = "round",
    axis: Axis | None = None,
    places: Sequence[int] = (),
    highlighted: int | None = None,
) -> str:
    """Means over rounds (or another whole number) as lines, the range over seeds as a band, labels at the end
    of the lines. `places` are those of their colours; of the lines from place `highlighted` on, only a thin
    grey trace is drawn until they are asked for."""
    width, height, left, top, bottom = 560, 340, 48, 14, 40
    every = [point for one in series for point in one.points]
    if not every:
        return '<p class="note">Nothing was evaluated yet.</p>'
    right = 24 + 7.5 * max(len(shorten(one.label, 18)) for one in series)
    first, last = min(p[0] for p in every), max(p[0] for p in every)
    axis = axis or Axis(nice_ticks(*worth_seeing(every, percent)))
    places = places or range(len(series))
    muted = [highlighted is not None and place >= highlighted for place in places]
    clip = f"clip-{re.sub('[^A-Za-z0-9]+', '-', name)}"

    def x(round: float) -> float:
        return left + (round - first) / max(last - first, 1) * (width - left - right)

    def y(value: float) -> float:
        share = min(
            max(axis.share(value), -2.0), 3.0
        )  # outside the chart all places are alike, and a browser knows no number of 50 digits
        return top + (1 - share) * (height - top - bottom)

    out = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)} by'
        f' {escape(across)}" data-x="{left},{width - right},{first},{last}"'
        f' data-percent="{int(percent)}"><clipPath id="{clip}"><rect x="0" y="{top - 4}" width="{width}"'
        f' height="{height - top - bottom + 8}"/></clipPath>'
    ]
    for tick in axis.ticks:
        text = tick_text(tick, percent)
        out.append(f'<path class="grid" d="M{left} {y(tick):.1f}H{width - right}"/>')
        out.append(f'<text class="tick end" x="{left - 8}" y="{y(tick) + 4:.1f}">{text}</text>')
    for tick in round_ticks(first, last):
        out.append(f'<text class="tick middle" x="{x(tick):.1f}" y="{height - bottom + 18}">{tick}</text>')
    out.append(
        f'<text class="tick middle" x="{(left + width - right) / 2}" y="{height - 4}">{escape(across)}</text>'
    )
    wanted = [min(max(y(one.points[-1][1]), top), height - bottom) if one.points else 0.0 for one in series]
    named = [i for i, quiet in enumerate(muted) if not quiet]
    ends = list(wanted)
    for i, end in zip(
        named, spread_out([wanted[i] for i in named], 14, top + 4, height - bottom), strict=True
    ):
        ends[i] = end
    for i in sorted(
        range(len(series)), key=lambda i: not muted[i]
    ):  # the quiet ones first, so that they hide nothing
        kind = f"{line_class(places[i])}{' muted' if muted[i] else ''}"
        out.append(_curve(series[i], places[i], kind, x, y, ends[i], f'clip-path="url(#{clip})"'))
    out.append(f'<path class="cursor" d="M0 {top}V{height - bottom}" visibility="hidden"/></svg>')
    return "".join(out)


def tick_text(value: float, percent: bool) -> str:
    return f"{100 * value:.3g} %" if percent else f"{value:.3g}"


def _curve(one: Series, place: int, kind: str, x: Scale, y: Scale, end: float, clip: str) -> str:
    if not one.points:
        return ""
    line = "M" + "L".join(f"{x(r):.1f} {y(mean):.1f}" for r, mean, _, _ in one.points)
    band = ""
    if any(low < high for _, _, low, high in one.points):
        upper = [f"{x(r):.1f} {y(high):.1f}" for r, _, _, high in one.points]
        lower = [f"{x(r):.1f} {y(low):.1f}" for r, _, low, _ in reversed(one.points)]
        band = f'<path class="band" d="M{"L".join(upper + lower)}Z"/>'
    r, mean = one.points[-1][:2]
    return (
        f'<g class="{kind}" data-line="{place}"><g {clip}>{band}<path class="line" d="{line}"/></g><circle'
        f' {clip} class="dot" cx="{x(r):.1f}" cy="{y(mean):.1f}" r="3.5"/><text class="label"'
        f' x="{x(r) + 9:.1f}" y="{end + 4:.1f}">{escape(shorten(one.label, 18))}</text></g>'
    )


def strips(
    rows: Sequence[tuple[str, Sequence[Dot], float | None, float | None]],
    most: int = 600,
    places: Sequence[int] = (),
) -> str:
    """A row per method: every client a dot at its accuracy, the mean and the worst tenth marked."""
    width, left, right, top = 1120, name_room([row[0] for row in rows]), 60, 8
    places = places or range(len(rows))
    row = 76 if len(rows) <= 6 else 48
    height = top + row * len(rows) + 34
    lowest = min((dot.accuracy for _, dots, _, _ in rows for dot in dots), default=0.0)
    ticks = nice_ticks(min(lowest, 0.95), 1.0)

    def x(share: float) -> float:
        return left + (share - ticks[0]) / (ticks[-1] - ticks[0]) * (width - left - right)

    out = [
        f'<svg class="chart wide" viewBox="0 0 {width} {height}" role="img" aria-label="Accuracy of every'
        ' client, a row per method">'
    ]
    for tick in ticks:
        out.append(f'<path class="grid" d="M{x(tick):.1f} {top}V{height - 34}"/>')
        out.append(f'<text class="tick middle" x="{x(tick):.1f}" y="{height - 14}">{100 * tick:.3g} %</text>')
    for down, (place, (label, dots, mean, worst)) in enumerate(zip(places, rows, strict=True)):
        middle = top + row * down + row / 2
        out.append(f'<g class="{line_class(place)}" data-line="{place}">')
        out.append(
            f'<text class="name" x="0" y="{middle + 4:.1f}">{escape(shorten(label, NAME_LETTERS))}</text>'
        )
        for pile in _swarm(thin_out(dots, most), x, row):
            out += [_client(dot, at, middle + up) for dot, at, up in pile]
            if len(pile) > 12:  # too many to count by eye
                out.append(
                    f'<text class="label" x="{pile[0][1] + 9:.1f}" y="{middle + 4:.1f}">×{len(pile)}</text>'
                )
        for value, kind, word in ((mean, "mean", "mean"), (worst, "worst", "worst 10 %")):
            if value is not None:
                path = f'd="M{x(max(value, ticks[0])):.1f} {middle - row / 2 + 8:.1f}v{row - 16}"'
                out.append(f'<path class="{kind}" {path}><title>{word}: {100 * value:.1f} %</title></path>')
        out.append("</g>")
    return "".join(out) + "</svg>"


def _client(dot: Dot, x: float, y: float) -> str:
    """An attacker is a hollow triangle: it is among the clients, but no mean counts it."""
    about = f"client {dot.client}, seed {dot.seed}: {100 * dot.accuracy:.1f} % of {dot.samples}"
    if dot.malicious:
        return (
            f'<path class="client foe" d="M{x:.1f} {y - 4:.1f}l4 7h-8z"><title>attacker,'
            f" {about}</title></path>"
        )
    return f'<circle class="client" cx="{x:.1f}" cy="{y:.1f}" r="3.6"><title>{about}</title></circle>'


def _swarm(dots: Sequence[Dot], x: Scale, row: int) -> list[list[tuple[Dot, float, float]]]:
    """Dots of nearly equal accuracy are piled up and down around the middle of their row."""
    piles: dict[int, list[Dot]] = {}
    for dot in sorted(dots, key=lambda d: (d.accuracy, d.client, d.seed)):
        piles.setdefault(round(x(dot.accuracy) / 7), []).append(dot)
    out = []
    for pile in piles.values():
        step = min(7.4, (row - 14) / max(len(pile), 1))
        out.append([(dot, x(dot.accuracy), (i - (len(pile) - 1) / 2) * step) for i, dot in enumerate(pile)])
    return out


def heat_map(
    counts: Sequence[Sequence[float]],
    names: Sequence[str],
    what: str = "Training samples",
    first: int = 0,
    most: float = 0,
    heads: Sequence[str] = (),
    words: tuple[str, str, str] = ("client", "class", "samples"),
    texts: Sequence[Sequence[str]] = (),
) -> str:
    """Clients across, classes down, darker for more samples; numbers where there is room. A map that shows
    only some clients, from `first` on, is as dark as the others when all are given the same `most`. Other
    things than clients and classes have `heads`, `words` for what is across, down and inside, and `texts` in
    place of the numbers."""
    clients, classes = len(counts), len(names)
    heads = heads or [str(first + place) for place in range(clients)]
    longest = max(len(shorten(name, 16)) for name in names)
    width, left, top = 1120, max(60, 18 + 7 * longest, 18 + 6 * len(words[0])), 22
    side = min(52.0, (width - left - 12) / max(clients, 1))
    tall = min(side if side >= 14 else 22.0, 30.0, max(8.0, 1200 / classes))
    below = top + tall * classes
    most = most or max((count for row in counts for count in row), default=0) or 1
    letters = max((len(text) for row in texts for text in row), default=len(str(most)))
    texts = texts or [[str(count) for count in row] for row in counts]
    roomy = side >= 7 * letters + 4 and tall >= 14
    gap = 1.5 if side >= 8 else 0.5
    box = f'width="{side - gap:.1f}" height="{tall - gap:.1f}" rx="{min(2, side / 6):.1f}"'
    out = [
        f'<svg class="chart wide" viewBox="0 0 {width} {below + 22:.0f}" role="img" aria-label="{what} of'
        f' every {words[0]} by {words[1]}"><pattern id="cells-{first}" x="{left}" y="{top}"'
        f' width="{side:.3f}" height="{tall:.3f}" patternUnits="userSpaceOnUse"><rect class="cell"'
        f' {box}/></pattern><rect fill="url(#cells-{first})" x="{left}" y="{top}"'
        f' width="{side * clients:.1f}" height="{tall * classes:.1f}"/>'
    ]
    for place, row in enumerate(counts):
        for kind, count in enumerate(row):
            if not count:
                continue
            share = math.sqrt(count / most)  # a square root keeps small counts visible
            at, down = left + side * place, top + tall * kind
            about = escape(
                f"{words[0]} {heads[place]}, {words[1]} {names[kind]}: {texts[place][kind]} {words[2]}".rstrip()  # noqa: E501
            )
            out.append(
                f'<rect class="heat" fill-opacity="{share:.2f}" x="{at:.1f}" y="{down:.1f}"'
                f" {box}><title>{about}</title></rect>"
            )
            if roomy:
                shade = "bright" if share > 0.6 else ""
                at, down = at + (side - gap) / 2, down + tall / 2 + 3.5
                out.append(
                    f'<text class="count {shade}" x="{at:.1f}"'
                    f' y="{down:.1f}">{escape(texts[place][kind])}</text>'
                )
    for kind in range(0, classes, round_step(12 / tall)):
        name = escape(shorten(names[kind], 16))
        out.append(
            f'<text class="tick end" x="{left - 10}" y="{top + tall * (kind + 0.5) + 3.5:.1f}">{name}</text>'
        )
    for place in range(0, clients, round_step(8 * max(map(len, heads), default=1) / side)):
        out.append(
            f'<text class="tick middle" x="{left + side * (place + 0.5):.1f}"'
            f' y="{below + 15:.1f}">{escape(heads[place])}</text>'
        )
    for word, at, down in ((words[1], left - 10, 12), (words[0], left - 16, below + 15)):
        out.append(f'<text class="tick end" x="{at}" y="{down:.1f}">{word}</text>')
    return "".join(out) + "</svg>"


def worth_seeing(points: Sequence[Point], rising: bool) -> tuple[float, float]:
    """The range of an axis. In long runs, steep first rounds would flatten all that follows, so there the
    curve may leave the chart; so may what a lost fight makes of a loss, which knows no bounds."""
    rounds = sorted({p[0] for p in points})
    settled = rounds[len(rounds) // 4] if len(rounds) > 12 else rounds[0]
    late = [p for p in points if p[0] >= settled]
    if rising:
        return min(p[2] for p in late), max(p[3] for p in points)
    usual = statistics.median(p[1] for p in late)
    within = [p[3] for p in late if p[3] <= _FAR_OFF * usual] or [p[3] for p in late]
    return min(p[2] for p in points), max(within)


def nice_ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers that enclose [low, high]."""
    if not high > low:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(start, stop + 1)]


def round_step(least: float) -> int:
    """1, 2, 5, 10, 20, 50 and so on: the first that is large enough."""
    power = 10 ** max(0, math.floor(math.log10(max(least, 1))))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= least)


def round_ticks(first: int, last: int) -> list[int]:
    """Whole rounds: the first, the last, and round numbers between them that keep their distance."""
    inner = [int(t) for t in nice_ticks(first, last, 6) if t == int(t)] if last > first else []
    gap = (last - first) / 12
    return sorted({first, last, *(t for t in inner if first + gap < t < last - gap)})


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels near where they belong, at least a gap apart where there is room."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    out = list(wanted)
    floor = low
    for i in order:
        out[i] = floor = max(wanted[i], floor)
        floor += gap
    ceiling = high
    for i in reversed(order):
        out[i] = ceiling = min(out[i], ceiling)
        ceiling -= gap
    return out


def thin_out(dots: Sequence[Dot], most: int) -> list[Dot]:
    """Every k-th dot in order of accuracy, the worst always among them."""
    ordered = sorted(dots, key=lambda d: d.accuracy)
    return ordered[:: max(1, math.ceil(len(ordered) / most))]


NAME_LETTERS = 30  # of a row's name beside a chart


def name_room(names: Sequence[str]) -> int:
    """How far from the left edge a chart begins that has these names beside it."""
    return max(150, 24 + round(8.6 * max((len(shorten(name, NAME_LETTERS)) for name in names), default=0)))


def shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
