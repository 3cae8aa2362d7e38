"""Signs of life, between a process and whoever keeps it up: a process that hangs does not end, and a node
that cannot reach its server would say so in its own log only.

    ALIVE            is touched every few seconds by a thread of the process
    ALIVE.away       is there while the process tries to reach its server in vain

The path stands in the environment (HOLDFAST_ALIVE); without it nothing is written."""

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
"""Seconds without a sign after which a process counts as frozen: a machine that swaps may need many for
one."""
_AWAY = 10.0  # seconds after which it is said: a SuperLink that is started again is away for less


def show_life() -> None:
    """From now on, for as long as this process runs."""
    if path := os.environ.get(ENVIRONMENT):
        threading.Thread(target=_show, args=(Path(path),), daemon=True).start()


def _show(path: Path) -> None:
    while True:
        try:
            path.touch()
        except (
            OSError
        ):  # a full disk, or the folder is gone: whoever looks has not seen a sign yet, and does not judge
            pass
        time.sleep(EVERY)


def note_away(away: bool) -> None:
    """Whether this process tries in vain to reach its server."""
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
    """Says once which processes cannot reach the server, and once that they can again."""

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self.said: set[str] = set()

    def tell(self, signs: Mapping[str, Path]) -> None:
        """By the signs of all processes that run."""
        away = {name: _age(away_file(sign)) for name, sign in signs.items()}
        for words, names in (
            (
                "cannot reach the server and will retry",
                {name for name, age in away.items() if age > _AWAY} - self.said,
            ),
            ("can reach the server again", {name for name, age in away.items() if age < 0} & self.said),
        ):
            if names:
                self.say(f"{', '.join(sorted(names))} {words}")
                self.said ^= names
        self.said &= set(signs)


def _age(file: Path) -> float:
    """Seconds; below 0 for none."""
    try:
        return max(0.0, time.time() - file.stat().st_mtime)
    except OSError:
        return -1.0
