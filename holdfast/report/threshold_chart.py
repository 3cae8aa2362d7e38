"""Values of all clients over the rounds as lines, against the threshold that the server held them to."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np

from holdfast.report.charts import Axis, round_ticks, spread_out, tick_text
from holdfast.report.run_data import Story

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1120, 290, 58, 128, 14, 30


@dataclass(frozen=True)
class _Plane:
    """Where rounds and values are drawn."""

    rounds: list[int]
    axis: Axis

    def x(self, round: float) -> float:
        return _LEFT + (round - self.rounds[0]) / (self.rounds[-1] - self.rounds[0]) * (
            _WIDTH - _LEFT - _RIGHT
        )

    def y(self, value: float) -> float:
        return _TOP + (1 - self.axis.share(value)) * (_HEIGHT - _TOP - _BOTTOM)

    def path(self, values: np.ndarray) -> str:
        """A line through the rounds that have a value; it breaks where one has none. A value alone is a
        dot."""
        out, pen = "", "M"
        for round, value in zip(self.rounds, values.tolist(), strict=True):
            if np.isfinite(value):
                out += f"{pen}{self.x(round):.0f} {self.y(value):.0f}" + ("h.1" if pen == "M" else "")
            pen = "L" if np.isfinite(value) else "M"
        return out

    def last(self, values: np.ndarray) -> tuple[float, float]:
        """Where a line ends."""
        place = int(np.flatnonzero(np.isfinite(values))[-1])
        return self.x(self.rounds[place]), self.y(float(values[place]))


def against(story: Story, grid: np.ndarray, bound: np.ndarray, title: str, share: bool) -> str:
    """A thin line per client and a thick one for the median, of benign clients and of attackers, whose median
    is dashed with triangles."""
    known = [float(v) for v in (*grid.flatten(), *bound) if np.isfinite(v)]
    if not np.isfinite(bound).any() or not np.isfinite(grid).any() or len(story.rounds) < 2:
        return ""
    plane = _Plane(story.rounds, Axis.over([(0, v, v, v) for v in known]))
    kinds = [("benign" if story.bad.any() else "median", "", np.where(story.bad, np.nan, grid))]
    if story.bad.any():
        kinds.append(("▲ attackers", " foe", np.where(story.bad, grid, np.nan)))
    out, ends = [_frame(plane, title, share)], []
    for name, kind, values in kinds:
        if not np.isfinite(values).any():
            continue
        middle = _median(values)
        out.append(f'<path class="one{kind}" d="{"".join(map(plane.path, values))}"/>')
        out.append(f'<path class="middling{kind}" d="{plane.path(middle)}"/>')
        out += _triangles(plane, middle) if kind else []
        ends.append((*plane.last(middle), "bad" if kind else "good", name))
    steps, last = _steps(plane, bound), plane.last(bound)
    out.append(f'<path class="bound" d="{steps}"/>')
    words = f"threshold {tick_text(float(bound[np.isfinite(bound)][-1]), share)}"
    return "".join((*out, *_labels([*ends, (*last, "boundary", words)]), "</svg></div>"))


def _frame(plane: _Plane, title: str, share: bool) -> str:
    out = [
        f'<div class="scroll"><svg class="chart wide" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)} of benign clients and attackers by round, and the threshold">'
    ]
    for tick in plane.axis.ticks:
        out.append(f'<path class="grid" d="M{_LEFT} {plane.y(tick):.1f}H{_WIDTH - _RIGHT}"/>')
        out.append(
            f'<text class="tick end" x="{_LEFT - 8}"'
            f' y="{plane.y(tick) + 4:.1f}">{tick_text(tick, share)}</text>'
        )
    for tick in round_ticks(plane.rounds[0], plane.rounds[-1]):
        out.append(f'<text class="tick middle" x="{plane.x(tick):.1f}" y="{_HEIGHT - 10}">{tick}</text>')
    return "".join(out) + f'<text class="tick end" x="{_LEFT - 8}" y="{_HEIGHT - 10}">round</text>'


def _median(values: np.ndarray) -> np.ndarray:
    """Of each round; NaN where nobody has a value."""
    there = np.isfinite(values)
    return np.array(
        [
            np.median(column[now]) if now.any() else np.nan
            for column, now in zip(values.T, there.T, strict=True)
        ]
    )


def _triangles(plane: _Plane, middle: np.ndarray) -> list[str]:
    known = np.flatnonzero(np.isfinite(middle))
    spots = [
        (plane.x(plane.rounds[i]), plane.y(float(middle[i])))
        for i in known[:: -max(1, len(plane.rounds) // 12)]
    ]
    return [f'<path class="tip3" d="M{x:.0f} {y - 5:.0f}l5 9h-10z"/>' for x, y in spots]


def _steps(plane: _Plane, bound: np.ndarray) -> str:
    """A threshold holds until the next one."""
    steps = ""
    for round, value in zip(plane.rounds, bound.tolist(), strict=True):
        if np.isfinite(value):
            x, y = f"{plane.x(round):.0f}", f"{plane.y(value):.0f}"
            steps += f"H{x}V{y}" if steps else f"M{x} {y}"
    return steps


def _labels(ends: list[tuple[float, float, str, str]]) -> list[str]:
    """Names where lines end; those that end at the edge keep their distance from each other."""
    edge = _WIDTH - _RIGHT - 40
    down = spread_out([y for x, y, _, _ in ends if x > edge], 15, _TOP, _HEIGHT - _BOTTOM)
    places = iter(down)
    return [
        f'<text class="{kind}" x="{x + 10:.0f}"'
        f' y="{(next(places) if x > edge else y) + 4:.0f}">{escape(words)}</text>'
        for x, y, kind, words in ends
    ]
