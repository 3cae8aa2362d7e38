"""One line of what `doctor`, `check-node` and `verify` say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    what: str
    good: bool
    said: str
