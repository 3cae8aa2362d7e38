"""The scheduler with an executor that only pretends: losses, silence, damaged files, workers that never
begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.core.errors import RunError
from holdfast.sweeps.dispatch import Dispatch, Event, Limits
from holdfast.sweeps.units import Unit

UNITS = [Unit(("a", "b"), (1.0, 1.0)), Unit(("c",), (1.0,)), Unit(("d",), (1.0,))]
Script = Callable[[int, Unit], list[Event]]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Pretended:
    """Says for each attempt what the script says, one event at a time, and checks that no cell is trained
    twice at the same time. An attempt without events is silent."""

    def __init__(self, script: Script, slots: int = 2, clock: Clock | None = None):
        self.script, self.many, self.clock = script, slots, clock or Clock()
        self.queues: dict[int, list[Event]] = {}
        self.started: list[tuple[str, ...]] = []
        self.training: dict[int, tuple[str, ...]] = {}
        self.stopped: list[int] = []

    def slots(self) -> int:
        return self.many

    def start(self, attempt: int, unit: Unit) -> None:
        busy = {cell for cells in self.training.values() for cell in cells}
        assert not busy & set(unit.cells), "a cell is trained twice at the same time"
        assert len(self.training) < self.many, "more units than slots"
        self.started.append(unit.cells)
        self.training[attempt] = unit.cells
        self.queues[attempt] = list(self.script(self.started.count(unit.cells), unit))

    def events(self, within: float) -> list[tuple[int, Event]]:
        found = [(attempt, queue.pop(0)) for attempt, queue in self.queues.items() if queue]
        if not found:
            self.clock.now += within
        for attempt, event in found:
            if event["event"] in ("done", "error", "lost"):
                self.training.pop(attempt, None)
        return found

    def stop(self, attempt: int) -> None:
        self.stopped.append(attempt)
        self.training.pop(attempt, None)

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *args: Any) -> None:
        pass


class Kept:
    """Cells in memory: `moved` gives one another round, `done` ends those of a unit."""

    def __init__(self) -> None:
        self.round: dict[str, int] = {}
        self.finished: set[str] = set()
        self.failed: dict[str, str] = {}

    def told(self, unit: Unit, event: Event) -> None:
        if event.get("damaged"):
            raise RunError("what a worker sent cannot be read")
        self.round[event["cell"]] = self.round.get(event["cell"], 0) + 1

    def left(self, unit: Unit) -> tuple[str, ...]:
        return tuple(cell for cell in unit.cells if cell not in self.finished and cell not in self.failed)

    def rounds(self, unit: Unit) -> int:
        return sum(self.round.get(cell, 0) for cell in unit.cells)

    def ended(self, unit: Unit) -> None:
        self.finished |= set(unit.cells)

    def give_up(self, unit: Unit, reason: str) -> None:
        self.failed |= {cell: reason for cell in self.left(unit)}


BEGAN: Event = {"event": "began", "where": "node 7 (process 12)"}
DONE: Event = {"event": "done"}
LOST: Event = {"event": "lost", "reason": "it was ended by signal 9"}


def moved(unit: Unit) -> Event:
    return {"event": "moved", "cell": unit.cells[0], "round": 1}


def played(script: Script, units: list[Unit] = UNITS, slots: int = 2) -> tuple[Pretended, Kept, list[str]]:
    clock, said = Clock(), list[str]()
    executor, cells = Pretended(script, slots, clock), Kept()
    Dispatch(executor, units, cells, said.append, Limits(30.0, 60.0, 3), clock).run()
    return executor, cells, said


def test_units_are_trained_once_each_in_their_order() -> None:
    executor, cells, _ = played(lambda nth, unit: [BEGAN, DONE])
    assert executor.started == [unit.cells for unit in UNITS]
    assert cells.finished == set("abcd") and not cells.failed


def test_a_unit_that_was_lost_goes_on_elsewhere() -> None:
    executor, cells, said = played(
        lambda nth, unit: [BEGAN, LOST] if nth == 1 and unit.cells == ("a", "b") else [BEGAN, DONE]
    )
    assert executor.started.count(("a", "b")) == 2 and len(executor.started) == 4
    assert cells.finished == set("abcd")
    assert "node 7 (process 12) is lost (it was ended by signal 9); its 2 cells go on" in said[0]


def test_a_unit_without_progress_is_given_up_and_the_others_go_on() -> None:
    executor, cells, _ = played(
        lambda nth, unit: [BEGAN, LOST] if unit.cells == ("a", "b") else [BEGAN, DONE]
    )
    assert executor.started.count(("a", "b")) == 3
    assert set(cells.failed) == {"a", "b"} and cells.finished == {"c", "d"}
    assert cells.failed["a"] == (
        "its worker was lost 3 times without a new round; the last, node 7 (process 12): it was ended by"
        " signal 9"
    )


def test_a_unit_that_makes_progress_is_tried_for_longer() -> None:
    executor, cells, _ = played(
        lambda nth, unit: [BEGAN, moved(unit), LOST if nth < 6 else DONE], [Unit(("a",), (1.0,))]
    )
    assert len(executor.started) == 6 and cells.finished == {"a"}


def test_a_silent_worker_does_not_hang_the_others() -> None:
    executor, cells, said = played(
        lambda nth, unit: [BEGAN] if nth == 1 and unit.cells == ("c",) else [BEGAN, DONE]
    )
    assert cells.finished == set("abcd") and executor.started.count(("c",)) == 2
    assert len(executor.stopped) == 1 and "no sign of life for 30 s" in said[0] and "node 7" in said[0]


def test_events_of_an_attempt_that_was_given_up_are_ignored() -> None:
    """A worker that was cut off may still train; what it says later must not count."""
    clock, cells = Clock(), Kept()
    executor = Pretended(lambda nth, unit: [BEGAN] if nth == 1 else [BEGAN, DONE], 1, clock)
    stop = executor.stop

    def late(attempt: int) -> None:
        stop(attempt)
        executor.queues[attempt] = [moved(UNITS[1]), {"event": "error", "reason": "too late"}]

    executor.stop = late  # type: ignore[method-assign]
    Dispatch(executor, UNITS[1:2], cells, lambda line: None, Limits(30.0, 60.0, 3), clock).run()
    assert cells.finished == {"c"} and not cells.failed and not cells.round


def test_damaged_files_cost_the_worker_its_unit() -> None:
    damaged = {"event": "files", "damaged": True}
    executor, cells, said = played(
        lambda nth, unit: [BEGAN, damaged, moved(unit), DONE] if nth == 1 else [BEGAN, DONE], UNITS[1:2]
    )
    assert executor.stopped == [1] and cells.finished == {"c"} and not cells.round
    assert "cannot be read" in said[0]


def test_an_error_of_the_cells_themselves_is_not_tried_again() -> None:
    error = {"event": "error", "reason": "the model does not fit the data"}
    executor, cells, _ = played(lambda nth, unit: [BEGAN, error] if unit.cells == ("c",) else [BEGAN, DONE])
    assert executor.started.count(("c",)) == 1
    assert cells.failed == {"c": "the model does not fit the data"} and cells.finished == {"a", "b", "d"}


def test_a_full_disk_of_a_worker_is_not_the_fault_of_the_cells() -> None:
    full = {"event": "error", "kind": "StoreError", "reason": "the disk is full"}
    executor, cells, _ = played(lambda nth, unit: [BEGAN, full if nth == 1 else DONE], UNITS[:1])
    assert executor.started == [("a", "b")] * 2 and cells.finished == {"a", "b"}


def test_workers_that_cannot_begin_end_the_sweep_with_the_reason() -> None:
    with pytest.raises(RunError, match="no worker could begin: it was ended by signal 9"):
        played(lambda nth, unit: [LOST])


def test_waiting_for_a_machine_that_never_comes_has_an_end() -> None:
    said: list[str] = []
    clock, cells = Clock(), Kept()
    executor = Pretended(lambda nth, unit: [BEGAN, DONE], 0, clock)
    with pytest.raises(RunError, match="no worker has begun for 60 s: 3 units wait"):
        Dispatch(executor, UNITS, cells, said.append, Limits(30.0, 60.0, 3), clock).run()
    assert said and "waiting for a free machine" in said[0]


def test_what_workers_say_names_them() -> None:
    _, _, said = played(lambda nth, unit: [BEGAN, {"event": "say", "line": "plan loop"}, DONE], UNITS[:1])
    assert said == ["node 7 (process 12): plan loop"]
