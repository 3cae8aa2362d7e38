"""Many experiments at once: their round generators run together, and what they ask for at the same point is
answered together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.core.errors import StoreError
from holdfast.core.generators import Finished, advance
from holdfast.core.types import Exchange, Uplink
from holdfast.engine.client_task import EVALUATE
from holdfast.engine.host_threads import each
from holdfast.engine.run_context import Call, RunContext
from holdfast.engine.workers import WorkerLost
from holdfast.local.per_client import TrainedApart
from holdfast.storage.store import PreparedRound, commit_all


class Engine(Protocol):
    """Whoever carries out exchanges: the simulator, or a fleet of real clients."""

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]: ...

    def close(self) -> None: ...


@dataclass
class RunDriver:
    """One experiment in the middle of its run: its cell, its generator, and what it waits for."""

    run_context: RunContext
    steps: Generator[Exchange | PreparedRound, Any, Any]
    waiting: Exchange | PreparedRound | None = None
    result: Any = None
    error: Exception | None = None

    def turn(self, up: Uplink | None) -> None:
        """Go on to the next exchange, or to the end. An experiment that fails stops there and takes no other
        with it; a disk that refuses is nobody's failure and stops them all."""
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
        """Where in its run it stands; those furthest behind go first, so that cells stay together and can be
        fused."""
        if isinstance(self.waiting, PreparedRound):
            return self.run_context.round, 2, 0
        assert self.waiting is not None
        return self.run_context.round, int(self.waiting.task == EVALUATE), self.waiting.step


def drive(
    engine: Engine,
    drivers: list[RunDriver],
    after: Callable[[RunDriver], None] = lambda driver: None,
    failed: Callable[[RunDriver], None] = lambda driver: None,
) -> None:
    """Play all to the end, or to their error; `after` is called whenever a player has moved on. The engine is
    closed behind them.

    A round is committed when all that play it are ready: then a killed process leaves them where they can go
    on together, and together means with the same bits. For the same reason `failed` is called only once the
    others have committed the round in which one failed: if the process is killed before that, the round is
    played again by all of them, with the one that fails."""
    told: set[int] = set()

    def tell(round: float) -> None:
        for driver in drivers:
            if driver.error is not None and driver.run_context.round <= round and id(driver) not in told:
                told.add(id(driver))
                failed(driver)

    with closing(engine):
        _to_the_end(engine, drivers, after, tell)


def _to_the_end(
    engine: Engine,
    drivers: list[RunDriver],
    after: Callable[[RunDriver], None],
    tell: Callable[[float], None],
) -> None:
    for driver in drivers:
        driver.turn(None)
        after(driver)
    while any(driver.waiting is not None for driver in drivers):
        behind = min(driver.place() for driver in drivers if driver.waiting is not None)
        now = [driver for driver in drivers if driver.waiting is not None and driver.place() == behind]
        if behind[1] == 2:
            commit_all([driver.waiting for driver in now if isinstance(driver.waiting, PreparedRound)])
            tell(behind[0])
            answers: list[Uplink | None] = [None] * len(now)
        else:
            answers = _exchange(engine, now)
        each(
            lambda pair: pair[0].turn(pair[1]) if pair[0].error is None else None,
            list(zip(now, answers, strict=True)),
        )
        for driver in now:
            after(driver)
    tell(math.inf)


def _exchange(engine: Engine, now: list[RunDriver]) -> list[Uplink | None]:
    """All at once; if that fails, one by one, so that only the one that cannot go on is left behind. A worker
    process that was lost may be nobody's failure, so then all are asked together once more: one by one, their
    last bits could be others."""
    try:
        try:
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
    """All or nothing: after an error, the private rows are what they were."""
    for driver in now:
        driver.run_context.rows.keep()
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
            driver.run_context.rows.restore()  # what some of them had already done would be done twice
        raise
