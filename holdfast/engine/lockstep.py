"""Many experiments at once: their loops run in lockstep, and exchanges at the same point of a round are
answered together."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from holdfast.core.errors import StoreError
from holdfast.core.generators import Finished, advance
from holdfast.core.together import Computation, answered
from holdfast.core.types import Exchange, Uplink
from holdfast.engine.client_task import EVALUATE
from holdfast.engine.host_threads import each
from holdfast.engine.run_context import Call, RunContext
from holdfast.engine.workers import WorkerLost
from holdfast.local.per_client import TrainedApart
from holdfast.local.programs import forget, with_room
from holdfast.storage.store import PreparedRound, commit_all
from holdfast.storage.write_behind import WriteBehind


class Engine(Protocol):
    """What answers exchanges: the simulator, several of them, or a Flower server with real clients. One with
    a true `writes_behind` may be asked for the next round while a round is still being committed; one with a
    true `replies_on_device` leaves what clients send there, and is given models that are there; one with a
    `commit` commits rounds itself."""

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]: ...

    def close(self) -> None: ...


@dataclass
class RunDriver:
    """One experiment during its run: its context, its generator, and what it waits for."""

    run_context: RunContext
    steps: Generator[Exchange | Computation | PreparedRound, Any, Any]
    waiting: Exchange | Computation | PreparedRound | None = None
    result: Any = None
    error: Exception | None = None

    def turn(self, up: Any) -> None:
        """Go on to the next exchange, or to the end. An experiment that fails stops there, and the others go
        on; an error of the disk stops them all."""
        try:
            request = advance(self.steps, up)
        except StoreError:
            raise
        except Exception as error:
            self.fail(error)
        else:
            finished = isinstance(request, Finished)
            self.waiting, self.result = (None, request.value) if finished else (request, None)

    def fail(self, error: Exception) -> None:
        self.waiting, self.error = None, error

    def place(self) -> tuple[int, int, int]:
        """How far its run is. Those furthest behind go first, so that experiments stay together and can be
        fused."""
        if isinstance(self.waiting, PreparedRound):
            return self.run_context.round, 2, 0
        assert isinstance(self.waiting, Exchange)
        return self.run_context.round, int(self.waiting.task == EVALUATE), self.waiting.step


def drive(
    engine: Engine,
    drivers: list[RunDriver],
    after: Callable[[RunDriver], None] = lambda driver: None,
    failed: Callable[[RunDriver], None] = lambda driver: None,
) -> None:
    """Run all experiments to their end or their error; `after` is called whenever one has moved on. The
    engine is closed at the end.

    A round is committed when all experiments in it are ready: then, after a kill, they can go on together,
    which means with the same bits. For the same reason `failed` is called only once the others have committed
    the round in which one failed: if the process is killed before that, all of them run the round again, with
    the one that fails.

    Where the engine allows it, a round is committed while the next one is under way. `after` is called once
    more when it is done, and it is always done before this function ends."""
    reported: set[int] = set()

    def report_failures(round: float) -> None:
        for driver in drivers:
            if driver.error is not None and driver.run_context.round <= round and id(driver) not in reported:
                reported.add(id(driver))
                failed(driver)

    with closing(engine), closing(WriteBehind()) as behind:
        beside = behind if getattr(engine, "writes_behind", False) else None
        commits = Commits(beside, after, report_failures, getattr(engine, "commit", commit_all))
        _run_to_end(engine, drivers, after, commits)
        report_failures(math.inf)


@dataclass
class Commits:
    """The commits of experiments that run together."""

    behind: WriteBehind | None
    """What commits while the next round is under way; without it, every commit is waited for."""
    after: Callable[[RunDriver], None]
    report_failures: Callable[[float], None]
    at_once: Callable[[Sequence[PreparedRound]], None] = commit_all
    """Commits rounds and waits for it."""
    on_their_way: list[RunDriver] = field(default_factory=list)
    round: int = 0
    began: float = field(default_factory=time.perf_counter)

    def commit(self, drivers: list[RunDriver]) -> None:
        """Commit the rounds that these experiments have prepared. The round before is committed when this
        returns; so is this one, if a run ends with it, or if it is too large for copies."""
        ready = [driver.waiting for driver in drivers if isinstance(driver.waiting, PreparedRound)]
        self.arrived(within=None)
        began, self.began = self.began, time.perf_counter()
        if self.behind is None or not self.behind.begin(ready, each):
            self.at_once(ready)
            self.report_failures(ready[0].round)
            return
        self.on_their_way, self.round = drivers, ready[0].round
        # beside a long round the disk takes no time, and who follows the run sees each round as it ends
        self.arrived(None if any(one.last for one in ready) else (self.began - began) / 100)

    def arrived(self, within: float | None = 0.0) -> None:
        """Tell of the commit on its way, if it is done within so many seconds; None waits for it."""
        if self.behind is not None and self.on_their_way and self.behind.done(within):
            drivers, self.on_their_way = self.on_their_way, []
            for driver in drivers:
                self.after(driver)
            self.report_failures(self.round)


def _run_to_end(
    engine: Engine,
    drivers: list[RunDriver],
    after: Callable[[RunDriver], None],
    commits: Commits,
) -> None:
    answers: list[Uplink | None]
    for driver in drivers:
        _turn([driver], [None])
        after(driver)
    while any(driver.waiting is not None for driver in drivers):
        behind = min(driver.place() for driver in drivers if driver.waiting is not None)
        now = [driver for driver in drivers if driver.waiting is not None and driver.place() == behind]
        if behind[1] == 2:
            commits.commit(now)
            answers = [None] * len(now)
        else:
            answers = _exchange(engine, now)
            commits.arrived()
        _turn(now, answers)
        answers = []  # a GPU has no room for what was sent beside the next exchange
        for driver in now:
            after(driver)
    commits.arrived(within=None)


def _turn(drivers: Sequence[RunDriver], answers: Sequence[Any]) -> None:
    """Let all go on to their next exchange, commit or end. What their servers compute on the way is computed
    together."""
    while drivers:
        each(
            lambda pair: pair[0].turn(pair[1]) if pair[0].error is None else None,
            list(zip(drivers, answers, strict=True)),
        )
        drivers = [driver for driver in drivers if isinstance(driver.waiting, Computation)]
        wanted = [driver.waiting for driver in drivers if isinstance(driver.waiting, Computation)]
        answers = _computed(wanted, again=not any(map(_by_ranks, drivers)))
        for driver, answer in zip(drivers, answers, strict=True):
            if isinstance(answer, Exception):
                driver.fail(answer)


def _by_ranks(driver: RunDriver) -> bool:
    """Whether several processes run the experiment: none of them may compute anything twice."""
    return driver.run_context.share is not None


def _computed(wanted: list[Computation], again: bool = True) -> list[Any]:
    """The answers to computations, or the errors that they ended with; where memory ran out, of a second
    attempt."""
    found = answered(wanted, each)
    if again and any(isinstance(answer, torch.OutOfMemoryError) for answer in found):
        found = []  # errors keep what the attempt had made
        forget()  # programs for training hold most of a GPU's memory; they are made again
        found = answered(wanted, each, batch=False)
    return found


def _exchange(engine: Engine, now: list[RunDriver]) -> list[Uplink | None]:
    """Answer all at once; if that fails, one by one, so that only the experiment that cannot go on stops.
    After the loss of a worker process all are answered together once more, since one by one their last bits
    could differ; so are they where a GPU's memory ran out, without the memory of programs."""
    try:
        try:
            if getattr(engine, "replies_on_device", False) and not any(map(_by_ranks, now)):
                return with_room(lambda: _together(engine, now))
            return _together(engine, now)
        except WorkerLost as lost:
            warnings.warn(f"{lost}; its round goes on with new ones", RuntimeWarning, stacklevel=2)
            return _together(engine, now)
    except StoreError:
        raise
    except Exception as error:
        if len(now) == 1:
            now[0].fail(error)
            return [None]
        if isinstance(error, TrainedApart):
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    return [answer for driver in now for answer in _exchange(engine, [driver])]


def _together(engine: Engine, now: list[RunDriver]) -> list[Uplink | None]:
    """Answer all, or leave the private rows, and what attackers remember, as they were."""
    for driver in now:
        driver.run_context.rows.keep()
        driver.run_context.adversary.memories.keep()
    try:
        return list(
            engine.exchange(
                [
                    Call(driver.run_context, driver.waiting)
                    for driver in now
                    if isinstance(driver.waiting, Exchange)
                ]
            )
        )
    except Exception:
        for driver in now:
            driver.run_context.rows.restore()  # else work that some had already done would be done twice
            driver.run_context.adversary.memories.restore()
        raise
