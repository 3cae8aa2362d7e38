"""What the three parts share: the course of a soak, its seeds, its folder, and how one disturbed command goes
on to its end."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks.soak.events import Watch
from benchmarks.soak.processes import Command, marked, send
from benchmarks.soak.record import Disturbance, Outcome

PATIENCE = 600.0
"""Seconds after which a command that should end is taken to hang."""


@dataclass
class Course:
    """One soak. `said` is called with every disturbance."""

    seed: int
    work: Path
    console: Console
    end: float = float("inf")
    """When no further disturbance is begun, by the monotonic clock."""
    mark: str = field(init=False)
    said: Callable[[Disturbance], None] = lambda one: None

    def __post_init__(self) -> None:
        self.mark = f"{self.work.name}-{random.SystemRandom().randrange(10**9)}"

    def chance(self, part: str) -> random.Random:
        return random.Random(f"{self.seed} {part}")

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def command(self, *arguments: object) -> Command:
        return Command(self.mark, self.work, *arguments)

    def alive(self, *roles: str) -> list[int]:
        """Processes of these roles, in the order of their numbers."""
        return sorted(pid for pid, role in marked(self.mark).items() if not roles or role in roles)

    def end_all(self) -> None:
        """Whatever is left; also what is frozen."""
        for _ in range(50):
            if not (left := self.alive()):
                return
            send(left, signal.SIGKILL)
            time.sleep(0.1)

    def say(self, one: Disturbance, number: int) -> None:
        after = "" if one.seconds is None else f"; next commit after {one.seconds:.1f} s"
        line = Text.assemble(
            f"{one.part} {number:3d}  ", (one.name, "bold"), f"  {one.moment}: {one.followed}{after}"
        )
        if one.broken:
            line.append(f"\n     BROKEN: {one.broken}", "red")
        self.console.print(line, soft_wrap=True)  # in one piece: a bar is drawn below
        self.said(one)


def mixed(wanted: Iterable[tuple[str, str, int]], part: str, chance: random.Random) -> list[Disturbance]:
    """So many of each kind and victim, in an order of the seed's."""
    plan = [Disturbance(part, kind, victim) for kind, victim, many in wanted for _ in range(many)]
    chance.shuffle(plan)
    return plan


def spread(total: int, among: list[str]) -> list[tuple[str, int]]:
    """As evenly as it goes."""
    return [(name, total // len(among) + (place < total % len(among))) for place, name in enumerate(among)]


def settle(pending: list[Disturbance], watch: Watch, ended: float | None = None) -> list[Disturbance]:
    """Note how long it was from each disturbance to the next commit, or to the end; those that still wait are
    returned."""
    waiting = []
    for one in pending:
        after = [at for at in watch.commits if at > one.at]
        if after or ended is not None:
            one.seconds = (after[0] if after else ended or one.at) - one.at
        else:
            waiting.append(one)
    return waiting


def undisturbed(course: Course, outcome: Outcome, *arguments: Any) -> bool:
    """Play one to its end; whether it got there."""
    command = course.command(*arguments)
    code = command.wait(PATIENCE)
    if code != 0:
        outcome.fail(f"the undisturbed one ended with {code}: {command.last_line}", course.console)
        course.end_all()
    return code == 0
