"""Hands the units of a sweep to executors, and copes with what is lost on the way.

An executor has a number of slots, each for one unit at a time: the GPUs or processes of this machine, or what
a Ray cluster has. What it tells comes as events, with the number of the attempt that they belong to. Each
unit has at most one attempt at a time, and events of an attempt that was given up are ignored, so nothing is
trained twice at the same time or written by two."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.core.errors import RunError, in_print
from holdfast.sweeps.units import Unit

Event = dict[str, Any]


class Executor(AbstractContextManager["Executor"], Protocol):
    """Something that trains units elsewhere; a context manager that ends all of it."""

    def slots(self) -> int:
        """How many units it can train at once, as of now."""

    def start(self, attempt: int, unit: Unit) -> None:
        """Begin to train a unit."""

    def events(self, within: float) -> list[tuple[int, Event]]:
        """What was told since the last call, by attempt; waits so many seconds where nothing was."""

    def stop(self, attempt: int) -> None:
        """Give up an attempt, whatever state it is in."""


class Cells(Protocol):
    """What the sweep does with what is told of its cells."""

    def told(self, unit: Unit, event: Event) -> None:
        """Take in an event about cells of this unit: files, or a round."""

    def left(self, unit: Unit) -> tuple[str, ...]:
        """The cells of the unit that are not finished."""

    def rounds(self, unit: Unit) -> int:
        """All committed rounds of its cells: more of them is progress."""

    def ended(self, unit: Unit) -> None:
        """Its worker says that it has done what it could."""

    def give_up(self, unit: Unit, reason: str) -> None:
        """Record that its cells that are not finished cannot go on."""


@dataclass(frozen=True)
class Limits:
    """How long is waited, in seconds, and how often a unit is tried."""

    silence: float = 120.0
    """Without a sign of life from a worker, until it counts as lost."""
    start: float = 600.0
    """Until a unit begins, while no other is running."""
    tries: int = 3
    """How often a unit is begun without a new committed round."""


@dataclass
class _Attempt:
    unit: Unit
    heard: float
    where: str = ""
    """The worker's name, once it has begun."""


class Dispatch:
    """One sweep: `run` returns when every unit is finished or given up."""

    def __init__(
        self,
        executor: Executor,
        units: list[Unit],
        cells: Cells,
        say: Callable[[str], None],
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.executor, self.cells, self.say, self.clock = executor, cells, say, clock
        self.limits = limits or Limits()
        self._waiting = deque(units)
        self._running: dict[int, _Attempt] = {}
        self._attempts = 0
        self._lost: dict[tuple[str, ...], int] = {}
        self._rounds = {unit.cells: cells.rounds(unit) for unit in units}
        self._any_began, self._idle_since, self._complained = False, clock(), clock()

    def run(self) -> None:
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self.executor.slots():
                self._start(self._waiting.popleft())
            for attempt, event in self.executor.events(within=1.0):
                if attempt in self._running:
                    self._take_in(attempt, event)
            self._check_times()

    def _start(self, unit: Unit) -> None:
        self._attempts += 1
        self._running[self._attempts] = _Attempt(unit, self.clock())
        self.executor.start(self._attempts, unit)

    def _take_in(self, number: int, event: Event) -> None:
        attempt = self._running[number]
        attempt.heard = self.clock()
        kind = event["event"]
        if kind == "began":
            attempt.where, self._any_began = in_print(str(event["where"])), True
        elif kind == "say":
            self.say(f"{attempt.where}: {event['line']}" if attempt.where else event["line"])
        elif kind in ("files", "moved"):
            try:
                self.cells.told(attempt.unit, event)
            except RunError as error:  # what it sent is damaged: another attempt may do better
                self.executor.stop(number)
                self._lose(number, str(error))
        elif kind == "done":
            del self._running[number]
            self.cells.ended(attempt.unit)
        elif kind == "error" and event.get("kind") == "StoreError":  # the disk's fault, not the cells'
            self._lose(number, event["reason"])
        elif kind == "error":
            del self._running[number]
            self.cells.give_up(attempt.unit, event["reason"])
        elif kind == "lost":
            self._lose(number, event["reason"])

    def _lose(self, number: int, reason: str) -> None:
        """A worker is gone: its unit goes on elsewhere from its last committed rounds, unless it has been
        tried too often."""
        attempt = self._running.pop(number)
        unit, where = attempt.unit, attempt.where or "a worker that had not begun"
        rounds = self.cells.rounds(unit)
        tries = 1 if rounds > self._rounds[unit.cells] else self._lost.get(unit.cells, 0) + 1
        self._lost[unit.cells], self._rounds[unit.cells] = tries, rounds
        if not self._any_began and tries >= self.limits.tries:
            raise RunError(f"no worker could begin: {reason}")
        if not self.cells.left(unit):
            return
        if tries >= self.limits.tries:
            times = f"{tries} times without a new round" if tries > 1 else "once"
            self.cells.give_up(unit, f"its worker was lost {times}; the last, {where}: {reason}")
        else:
            many = len(self.cells.left(unit))
            cells = f"{many} cells go" if many > 1 else "cell goes"
            self.say(f"{where} is lost ({reason}); its {cells} on elsewhere from the last round")
            self._waiting.append(unit)

    def _check_times(self) -> None:
        now = self.clock()
        for number, attempt in list(self._running.items()):
            if attempt.where and now - attempt.heard > self.limits.silence:
                self.executor.stop(number)
                self._lose(number, f"no sign of life for {self.limits.silence:.0f} s")
        if not self._running and not self._waiting or any(a.where for a in self._running.values()):
            self._idle_since = self._complained = now
        elif now - self._idle_since > self.limits.start:
            many = len(self._waiting) + len(self._running)
            raise RunError(
                f"no worker has begun for {self.limits.start:.0f} s: {many} units wait for a free machine;"
                " what is finished is saved, and the same command continues"
            )
        elif now - self._complained > self.limits.start / 10:
            self._complained = now
            self.say(f"waiting for a free machine since {now - self._idle_since:.0f} s")
