"""Axes of the page's charts: which values have a tick, where values lie, and how both axes are drawn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from holdfast.report import svg

Point = tuple[int, float, float, float]
"""Round (or another whole number), mean, lowest, highest."""

_FAR_OFF = 10  # a loss above this many times the median is left outside a chart


@dataclass(frozen=True)
class Axis:
    """Values between the first tick (share 0) and the last one (share 1)."""

    ticks: Sequence[float]
    log: bool = False

    def share(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        if self.log:
            return (math.log10(max(value, low)) - math.log10(low)) / (math.log10(high) - math.log10(low))
        return (value - low) / (high - low)

    @staticmethod
    def over(points: Sequence[Point]) -> Axis:
        """An axis that shows every point: logarithmic where most values would otherwise lie at the bottom,
        and from 0 where the values are small compared with the largest, or nearly the same."""
        low, high = min(p[2] for p in points), max(p[3] for p in points)
        if low > 0 and high > 200 * low:
            exponents = range(math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9) + 1)
            return Axis([10.0**e for e in exponents], log=True)
        return Axis(nice_ticks(min(low, 0.0) if low < 0.3 * high or high - low < 0.2 * high else low, high))


@dataclass(frozen=True)
class PlotArea:
    """The rectangle in which data is drawn, in the units of the chart."""

    left: float
    top: float
    right: float
    bottom: float

    def x(self, share: float) -> float:
        return self.left + share * (self.right - self.left)

    def y(self, share: float) -> float:
        return self.top + (1 - share) * (self.bottom - self.top)

    def round_x(self, round: float, first: int, last: int) -> float:
        """Where a round lies when the first and the last round lie at the edges."""
        return self.x((round - first) / max(last - first, 1))

    def value_axis(self, axis: Axis, write: Callable[[float], str]) -> list[Markup]:
        """Horizontal lines with their values on the left."""
        out = []
        for tick in axis.ticks:
            y = self.y(axis.share(tick))
            out.append(svg.path("grid", f"M{self.left:g} {y:.1f}H{self.right:g}"))
            out.append(svg.text("tick end", self.left - 8, y + 4, write(tick)))
        return out

    def upright_axis(self, ticks: Iterable[tuple[float, str]]) -> list[Markup]:
        """Vertical lines at these places, with labels below them."""
        out = []
        for x, words in ticks:
            out.append(svg.path("grid", f"M{x:.1f} {self.top:g}V{self.bottom:g}"))
            out.append(svg.text("tick middle", x, self.bottom + 18, words))
        return out

    def labels_below(self, ticks: Iterable[tuple[float, str]]) -> list[Markup]:
        """Labels at these places below the area, without lines."""
        return [svg.text("tick middle", x, self.bottom + 18, words) for x, words in ticks]

    def name_below(self, name: str) -> Markup:
        """The name of the horizontal axis, in the middle below its labels."""
        return svg.text("tick middle", (self.left + self.right) / 2, self.bottom + 36, name)

    def name_beside(self, name: str) -> Markup:
        """The name of the horizontal axis, on the left of its labels."""
        return svg.text("tick end", self.left - 8, self.bottom + 18, name)

    def rounds(self, first: int, last: int) -> list[tuple[float, str]]:
        """Places and labels of rounds."""
        return [(self.round_x(tick, first, last), str(tick)) for tick in round_ticks(first, last)]


def broken_line(points: Iterable[tuple[float, float]]) -> str:
    """A path through the points; it breaks where a `y` is not finite. A single value becomes a dot."""
    out, move = "", True
    for x, y in points:
        known = math.isfinite(y)
        if known:
            out += f"M{x:.0f} {y:.1f}h.1" if move else f"L{x:.0f} {y:.1f}"
        move = not known
    return out


def worth_seeing(points: Sequence[Point], rising: bool) -> tuple[float, float]:
    """The range of an axis. In long runs the first rounds may lie outside, because their steep curve would
    flatten all that follows; so may losses far above the others, because a loss has no upper bound."""
    rounds = sorted({p[0] for p in points})
    settled = rounds[len(rounds) // 4] if len(rounds) > 12 else rounds[0]
    late = [p for p in points if p[0] >= settled]
    if rising:
        return min(p[2] for p in late), max(p[3] for p in points)
    usual = statistics.median(p[1] for p in late)
    within = [p[3] for p in late if p[3] <= _FAR_OFF * usual] or [p[3] for p in late]
    return min(p[2] for p in points), max(within)


def tick_text(value: float, percent: bool) -> str:
    return f"{100 * value:.3g} %" if percent else f"{value:.3g}"


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
    """The first of 1, 2, 5, 10, 20, 50 and so on that is at least this large."""
    power = 10 ** max(0, math.floor(math.log10(max(least, 1))))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= least)


def round_ticks(first: int, last: int) -> list[int]:
    """The first round, the last one, and round numbers between them that keep their distance."""
    inner = [int(t) for t in nice_ticks(first, last, 6) if t == int(t)] if last > first else []
    gap = (last - first) / 12
    return sorted({first, last, *(t for t in inner if first + gap < t < last - gap)})


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels near the wanted ones, at least a gap apart where there is room."""
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


def shorten(text: str, most: int) -> str:
    """The text, or its beginning and an ellipsis where it is longer than `most` letters."""
    return text if len(text) <= most else text[: most - 1] + "…"
