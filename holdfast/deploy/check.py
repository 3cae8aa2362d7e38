"""One line of the output of `doctor`, `check-node` and `verify`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    what: str
    good: bool
    said: str
