"""Measures: numbers that tables and figures show and that are not in the results of a run. Each is a function
of a finished run, by name; if the metric has `by`, also of the label on that axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from holdfast.core.errors import ConfigError, suggest

Measure = Callable[..., float | None]
M = TypeVar("M", bound=Measure)
_MEASURES: dict[str, Measure] = {}


def measure(name: str) -> Callable[[M], M]:
    def keep(function: M) -> M:
        _MEASURES[name] = function
        return function

    return keep


def measured(name: str) -> Measure:
    if name not in _MEASURES:
        raise ConfigError(f"no measure '{name}'{suggest(name, _MEASURES)}")
    return _MEASURES[name]
