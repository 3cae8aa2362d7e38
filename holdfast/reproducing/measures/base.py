"""What some tables and figures show and no result has: a function of a finished run each, by name."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.errors import ConfigError, suggest
from holdfast.results import Run

Measure = Callable[[Run], float | None]
_MEASURES: dict[str, Measure] = {}


def measure(name: str) -> Callable[[Measure], Measure]:
    def keep(function: Measure) -> Measure:
        _MEASURES[name] = function
        return function

    return keep


def measured(name: str) -> Measure:
    if name not in _MEASURES:
        raise ConfigError(f"no measure '{name}'{suggest(name, _MEASURES)}")
    return _MEASURES[name]
