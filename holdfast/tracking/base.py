"""What a tracker does, and what all of them are told in the same words."""

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
    """A run that the tracker has seen before, of an experiment that is resumed."""

    id: str
    round: int
    """The last round it was told."""


class Tracker(Protocol):
    """One experiment in one tracker. It may raise whatever it likes: then it is switched off, and the
    experiment goes on."""

    where: str
    """For the user, once it has begun: where to look."""

    def begin(self, config: Mapping[str, Any], folder: Path, label: str, known: KnownRun | None) -> str:
        """Open a run, or go on with one that is known; gives the name by which to find it again."""

    def round(self, round: int, figures: Figures) -> None:
        """A round is committed; each is told once, in order."""

    def end(self, final: Figures | None) -> None:
        """The experiment is finished; without final figures it was stopped or failed, and may be resumed."""


def numbers(figures: Mapping[str, Any]) -> Figures:
    """What a tracker can draw: figures that are there and finite."""
    found = {name: float(value) for name, value in figures.items() if isinstance(value, (int, float))}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config by dotted keys, without what is not set, and without anything that is called a secret."""
    flat = flatten(dict(config))
    return {
        key: value
        for key, value in flat.items()
        if value is not None and not any(word in key.lower() for word in _SECRET)
    }


def finals(final: Figures) -> Figures:
    """Final figures under names of their own: beside the curves, not at their end."""
    return {f"final/{name}": value for name, value in final.items()}


def harmless(text: str) -> str:
    """Without keys: trackers like to quote the address they were given, and some addresses hold a
    password."""
    for name, value in os.environ.items():
        if len(value) > 5 and re.search(r"KEY|TOKEN|PASSWORD|SECRET", name):
            text = text.replace(value, "***")
    return re.sub(r"://[^/@\s]+@", "://***@", text)
