"""Curves over rounds as matplotlib figures, for a notebook or a paper. matplotlib comes with the extra
`figures`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from holdfast.core.errors import ConfigError, suggest
from holdfast.core.notebook_figure import shown_in_notebooks
from holdfast.evaluation.scores import METRICS
from holdfast.report.axis import Axis, Point, nice_ticks, worth_seeing
from holdfast.report.drawing import figure_of
from holdfast.report.plots import curves

Line = tuple[str, Sequence[Point]]
"""A label and its points: round, mean, lowest, highest."""


def curve_figure(
    lines: Sequence[Line], name: str, metrics: Collection[str], size: tuple[float, float] | None = None
) -> Any:
    """A figure of these lines; `metrics` are what they show, which decides whether the axis is in percent;
    `size` is in inches."""
    points = [point for _, those in lines for point in those]
    if not points:
        raise ConfigError(f"plot: no round has a value of '{name}' yet")
    shares = all(map(is_share, metrics))
    axis = Axis(nice_ticks(*worth_seeing(points, shares))) if shares else Axis.over(points)
    drawing = curves(lines, name, shares, "round", axis)
    return shown_in_notebooks(figure_of([drawing if size is None else replace(drawing, size=size)]))


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 and is shown in percent."""
    words = metric.split("/")
    shares = {"accuracy", *METRICS}
    return bool(shares & set(words)) and not {"std", "last10_std", "seconds", "bytes"} & set(words)


def check_metric(metric: str, known: Collection[str]) -> None:
    """Refuse a metric that the runs do not have."""
    if metric not in known:
        raise ConfigError(f"unknown metric '{metric}'{suggest(metric, known)}")
