"""The interface of a tracker, and helpers that all trackers share."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast.sweeps.grid import flatten

Figures = dict[str, float]
_SECRET = ("token", "password", "secret", "api_key", "apikey", "credential")


@dataclass(frozen=True)
class KnownRun:
    """A run that the tracker already knows, because its experiment is resumed."""

    id: str
    round: int
    """The last round that it received."""


class Tracker(Protocol):
    """One experiment in one tracker. It may raise any exception: then it is switched off, and the experiment
    continues."""

    where: str
    """Where the user can find the run; set once it has begun."""

    def begin(self, config: Mapping[str, Any], folder: Path, label: str, known: KnownRun | None) -> str:
        """Open a run, or continue a known one; return the id by which to find it again."""

    def round(self, round: int, figures: Figures) -> None:
        """Record a committed round; called once for each round, in order."""

    def end(self, final: Figures | None) -> None:
        """End the run. Without final figures, the experiment was stopped or failed, and may be resumed."""


def numbers(figures: Mapping[str, Any]) -> Figures:
    """Return the figures that a tracker can draw: those that exist and are finite."""
    found = {name: float(value) for name, value in figures.items() if isinstance(value, (int, float))}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config by dotted keys, without unset values and without secrets."""
    flat = flatten(dict(config))
    return {
        key: value
        for key, value in flat.items()
        if value is not None and not any(word in key.lower() for word in _SECRET)
    }


def finals(final: Figures) -> Figures:
    """Return final figures under separate names, so that they do not extend the curves."""
    return {f"final/{name}": value for name, value in final.items()}


def harmless(text: str) -> str:
    """Remove secrets: trackers may quote the address they were given, which may hold a password."""
    for name, value in os.environ.items():
        if len(value) > 5 and re.search(r"KEY|TOKEN|PASSWORD|SECRET", name):
            text = text.replace(value, "***")
    return re.sub(r"://[^/@\s]+@", "://***@", text)
