"""How much memory the processes of a soak hold while it goes on, and whether it grows with the rounds."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.soak.processes import marked, own_memory

MEGABYTE = 1e6
GROWTH = 0.05
"""Share of itself by which a process may be larger in its last quarter than in its second: caches fill, and
Python's heap settles."""
SLACK = 4 * MEGABYTE
LIVED, ROUNDS = 12, 4
"""Samples and rounds that a process must have lived through to be judged: until its first round is over it is
still starting."""


@dataclass
class Life:
    """One process: what it was, and (round, bytes) as time went by."""

    role: str
    samples: list[tuple[int, int]] = field(default_factory=list)

    def quarters(self) -> tuple[float, float] | None:
        """Median bytes in the second and the last quarter of its life between its first round and its last,
        after which it may do other things: a run prints its tables."""
        first, last = self.samples[0][0], self.samples[-1][0]
        held = [bytes for round, bytes in self.samples if first < round < last]
        if len(held) < LIVED or self.rounds < ROUNDS:
            return None
        quarter = len(held) // 4
        return statistics.median(held[quarter : 2 * quarter]), statistics.median(held[-quarter:])

    @property
    def rounds(self) -> int:
        return self.samples[-1][0] - self.samples[0][0]

    def grew(self) -> bool:
        quarters = self.quarters()
        return quarters is not None and quarters[1] > quarters[0] * (1 + GROWTH) + SLACK


class Memory:
    """Looks every so often, in a thread of its own."""

    def __init__(self, mark: str, round: Callable[[], int], every: float = 0.5):
        self.mark, self.round, self.every = mark, round, every
        self.lives: dict[tuple[int, str], Life] = {}
        self.totals: list[int] = []
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.done.wait(self.every):
            began, total, round = time.monotonic(), 0, self.round()
            for pid, role in marked(self.mark).items():
                held = own_memory(pid)
                total += held
                if role != "helper":
                    self.lives.setdefault((pid, role), Life(role)).samples.append((round, held))
            self.totals.append(total)
            self.done.wait(
                min(5.0, 5 * (time.monotonic() - began))
            )  # looking must not be what keeps the machine busy

    def peak(self) -> float:
        return max(self.totals, default=0) / MEGABYTE

    def peaks(self) -> tuple[float, float]:
        """The most that all processes held together, in the first and in the second half of the time, in
        MB."""
        half = len(self.totals) // 2
        return (
            max(self.totals[: half + 1], default=0) / MEGABYTE,
            max(self.totals[half:], default=0) / MEGABYTE,
        )

    def by_role(self) -> dict[str, Life]:
        """Of each role the process that lived through the most rounds."""
        longest: dict[str, Life] = {}
        for life in self.lives.values():
            best = longest.get(life.role)
            if life.quarters() is not None and (best is None or life.rounds > best.rounds):
                longest[life.role] = life
        return dict(sorted(longest.items()))

    def grown(self) -> list[str]:
        return [f"{life.role} grew: {in_words(life)}" for life in self.lives.values() if life.grew()]


def in_words(life: Life) -> str:
    quarters = life.quarters()
    assert quarters is not None
    return f"{quarters[0] / MEGABYTE:.0f} to {quarters[1] / MEGABYTE:.0f} MB over {life.rounds} rounds"
