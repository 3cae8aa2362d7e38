"""Experiments driven together: in which order their rounds are committed and their failures told."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.together import Computation
from holdfast.core.types import Uplink
from holdfast.engine import lockstep
from holdfast.engine.lockstep import RunDriver, drive
from holdfast.engine.simulator import Call
from holdfast.storage import write_behind
from holdfast.storage.store import PreparedRound


class Idle:
    """Nobody asks it anything."""

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]:
        raise AssertionError("no exchange is expected")

    def close(self) -> None: ...


def driver(name: str, rounds: int, fails_in: int | None = None, first: int = 1) -> RunDriver:
    """Commits its rounds and does nothing else."""
    run_context: Any = SimpleNamespace(label=name, round=0)
    store: Any = SimpleNamespace(name=name)

    def run_case() -> Generator[PreparedRound, Any, str]:
        for run_context.round in range(first, rounds + 1):
            if run_context.round == fails_in:
                raise ZeroDivisionError(name)
            yield PreparedRound(store, run_context.round)
        return name

    return RunDriver(run_context, run_case())


class One(Computation):
    def alone(self) -> int:
        return 1


class Behind(Idle):
    writes_behind = True


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("engine", [Idle(), Behind()])
def test_a_failure_is_reported_once_the_others_have_committed_its_round(
    monkeypatch: pytest.MonkeyPatch, engine: Idle, order: int
) -> None:
    """If the process is killed before that, the round is played again by all, with the one that fails. Of
    four, d stands at another round when they go on, and fails at once; c fails in a round that nobody else
    plays."""
    events: list[str] = []

    def commit(ready: Sequence[PreparedRound]) -> None:
        events.extend(sorted(f"{each.store.name}{each.round}" for each in ready))

    monkeypatch.setattr(lockstep, "commit_all", commit)
    monkeypatch.setattr(write_behind, "write_all", commit)
    monkeypatch.setattr(write_behind, "settle_all", lambda ready: None)
    drivers = [
        driver("a", 3),
        driver("b", 3, fails_in=2),
        driver("c", 4, fails_in=4),
        driver("d", 4, fails_in=3, first=3),
    ][::order]
    drive(engine, drivers, failed=lambda fallen: events.append(f"{fallen.run_context.label} failed"))
    assert events == ["a1", "b1", "c1", "a2", "c2", "b failed", "a3", "c3", "d failed", "c failed"]
    assert {p.run_context.label: p.result for p in drivers} == {"a": "a", "b": None, "c": None, "d": None}


def test_a_server_may_ask_for_any_number_of_computations_in_a_row() -> None:
    """One for each of many clusters, say: each is a step of a loop, not a call inside the one before."""

    def steps() -> Generator[Computation, Any, int]:
        total = 0
        for _ in range(3000):
            total += yield One()
        return total

    run_context: Any = SimpleNamespace(label="", round=0, share=None)
    alone = RunDriver(run_context, steps())
    drive(Idle(), [alone])
    assert (alone.result, alone.error) == (3000, None)
