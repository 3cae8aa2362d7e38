"""Values of all clients over the rounds as lines, with the threshold that the server compared them with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from holdfast.report import run_plots, svg
from holdfast.report.axis import Axis, PlotArea, broken_line, spread_out, tick_text
from holdfast.report.drawing import Drawing
from holdfast.report.run_data import RunData

_WIDTH, _HEIGHT = 1120, 290
_AREA = PlotArea(58, 14, _WIDTH - 128, _HEIGHT - 30)


@dataclass(frozen=True)
class _Plane:
    """Where rounds and values are drawn."""

    rounds: list[int]
    axis: Axis

    def x(self, round: float) -> float:
        return _AREA.round_x(round, self.rounds[0], self.rounds[-1])

    def y(self, value: float) -> float:
        return _AREA.y(self.axis.share(value))

    def path(self, values: np.ndarray) -> str:
        """A line through the rounds that have a value."""
        places = zip(self.rounds, values.tolist(), strict=True)
        return broken_line((self.x(r), self.y(v) if np.isfinite(v) else np.nan) for r, v in places)

    def last(self, values: np.ndarray) -> tuple[float, float]:
        """Where a line ends."""
        place = int(np.flatnonzero(np.isfinite(values))[-1])
        return self.x(self.rounds[place]), self.y(float(values[place]))


def threshold_drawings(
    run_data: RunData, grid: np.ndarray, bound: np.ndarray, title: str, share: bool
) -> list[Drawing]:
    """The same chart as a figure for papers; none where there is nothing to draw."""
    if not _drawable(run_data, grid, bound):
        return []
    name = f"{title} of benign clients and attackers by round, and the threshold"
    return [
        run_plots.thresholds(
            name, run_data.rounds, [kind[::2] for kind in _kinds(run_data, grid)], bound, share
        )
    ]


def _drawable(run_data: RunData, grid: np.ndarray, bound: np.ndarray) -> bool:
    return bool(np.isfinite(bound).any() and np.isfinite(grid).any() and len(run_data.rounds) > 1)


def _kinds(run_data: RunData, grid: np.ndarray) -> list[tuple[str, str, np.ndarray]]:
    """Label, class and values of benign clients and of attackers."""
    kinds = [("benign" if run_data.bad.any() else "median", "", np.where(run_data.bad, np.nan, grid))]
    if run_data.bad.any():
        kinds.append(("▲ attackers", " foe", np.where(run_data.bad, grid, np.nan)))
    return kinds


def against(run_data: RunData, grid: np.ndarray, bound: np.ndarray, title: str, share: bool) -> Markup:
    """A thin line per client and a thick one for the median, of benign clients and of attackers. The
    attackers' median is dashed and has triangles."""
    known = [float(v) for v in (*grid.flatten(), *bound) if np.isfinite(v)]
    if not _drawable(run_data, grid, bound):
        return Markup()
    plane = _Plane(run_data.rounds, Axis.over([(0, v, v, v) for v in known]))
    out = _AREA.value_axis(plane.axis, lambda tick: tick_text(tick, share))
    out += _AREA.labels_below(_AREA.rounds(plane.rounds[0], plane.rounds[-1]))
    out.append(_AREA.name_beside("round"))
    ends = []
    for name, kind, values in _kinds(run_data, grid):
        if not np.isfinite(values).any():
            continue
        middle = _median(values)
        out.append(svg.path(f"one{kind}", "".join(map(plane.path, values))))
        out.append(svg.path(f"middling{kind}", plane.path(middle)))
        out += _triangles(plane, middle) if kind else []
        ends.append((*plane.last(middle), "bad" if kind else "good", name))
    out.append(svg.path("bound", _steps(plane, bound)))
    words = f"threshold {tick_text(float(bound[np.isfinite(bound)][-1]), share)}"
    out += _labels([*ends, (*plane.last(bound), "boundary", words)])
    label = f"{title} of benign clients and attackers by round, and the threshold"
    return svg.element("div", svg.chart("chart wide", _WIDTH, _HEIGHT, label, out), class_="scroll")


def _median(values: np.ndarray) -> np.ndarray:
    """The median of each round; NaN where no client has a value."""
    there = np.isfinite(values)
    return np.array(
        [
            np.median(column[now]) if now.any() else np.nan
            for column, now in zip(values.T, there.T, strict=True)
        ]
    )


def _triangles(plane: _Plane, middle: np.ndarray) -> list[Markup]:
    known = np.flatnonzero(np.isfinite(middle))
    spots = [
        (plane.x(plane.rounds[i]), plane.y(float(middle[i])))
        for i in known[:: -max(1, len(plane.rounds) // 12)]
    ]
    return [svg.path("tip3", f"M{x:.0f} {y - 5:.0f}l5 9h-10z") for x, y in spots]


def _steps(plane: _Plane, bound: np.ndarray) -> str:
    """A threshold is valid until the next one."""
    steps = ""
    for round, value in zip(plane.rounds, bound.tolist(), strict=True):
        if np.isfinite(value):
            x, y = f"{plane.x(round):.0f}", f"{plane.y(value):.0f}"
            steps += f"H{x}V{y}" if steps else f"M{x} {y}"
    return steps


def _labels(ends: list[tuple[float, float, str, str]]) -> list[Markup]:
    """Names where lines end; those at the right edge keep their distance from each other."""
    edge = _AREA.right - 40
    places = iter(spread_out([y for x, y, _, _ in ends if x > edge], 15, _AREA.top, _AREA.bottom))
    return [
        svg.text(kind, f"{x + 10:.0f}", f"{(next(places) if x > edge else y) + 4:.0f}", words)
        for x, y, kind, words in ends
    ]
