"""Signs of life from a process to its supervisor: a process that hangs does not end, and a node that cannot
reach its server would report it in its own log only.

    ALIVE            is touched every few seconds by a thread of the process
    ALIVE.away       is there while the process tries to reach its server in vain

The path is in the environment (HOLDFAST_ALIVE); without it nothing is written."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ENVIRONMENT = "HOLDFAST_ALIVE"
EVERY = 5.0
"""Seconds between two signs."""
FROZEN = 120.0
"""Seconds without a sign after which a process counts as frozen; a machine that swaps may be slow."""
_AWAY = 10.0  # seconds before it is reported: a SuperLink that is restarted is away for less


def show_life() -> None:
    """Touch the file every few seconds, for as long as this process runs."""
    if path := os.environ.get(ENVIRONMENT):
        threading.Thread(target=_show, args=(Path(path),), daemon=True).start()


def _show(path: Path) -> None:
    while True:
        try:
            path.touch()
        except OSError:  # a full disk, or the folder was removed: then the supervisor sees no sign at all
            pass
        time.sleep(EVERY)


def note_away(away: bool) -> None:
    """Record whether this process cannot reach its server."""
    if path := os.environ.get(ENVIRONMENT):
        try:
            if not away:
                away_file(Path(path)).unlink(missing_ok=True)
            elif not away_file(Path(path)).exists():
                away_file(Path(path)).touch()
        except OSError:
            pass


def away_file(sign: Path) -> Path:
    return sign.with_name(f"{sign.name}.away")


class ServerContact:
    """Reports once which processes cannot reach the server, and once that they can again."""

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self.reported: set[str] = set()

    def report(self, signs: Mapping[str, Path]) -> None:
        """Report changes, by the signs of all processes that run."""
        away = {name: _age(away_file(sign)) for name, sign in signs.items()}
        for words, names in (
            (
                "cannot reach the server and will retry",
                {name for name, age in away.items() if age > _AWAY} - self.reported,
            ),
            ("can reach the server again", {name for name, age in away.items() if age < 0} & self.reported),
        ):
            if names:
                self.say(f"{', '.join(sorted(names))} {words}")
                self.reported ^= names
        self.reported &= set(signs)


def _age(file: Path) -> float:
    """Return the age in seconds; below 0 if there is no file."""
    try:
        return max(0.0, time.time() - file.stat().st_mtime)
    except OSError:
        return -1.0
