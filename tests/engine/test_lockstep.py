"""Experiments driven together: in which order their rounds are committed and their failures told."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.types import Uplink
from holdfast.engine import lockstep
from holdfast.engine.lockstep import Player, drive
from holdfast.engine.simulator import Call
from holdfast.storage.store import Ready


class Idle:
    """Nobody asks it anything."""

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]:
        raise AssertionError("no exchange is expected")

    def close(self) -> None: ...


def player(name: str, rounds: int, fails_in: int | None = None, first: int = 1) -> Player:
    """Commits its rounds and does nothing else."""
    cell: Any = SimpleNamespace(label=name, round=0)
    store: Any = SimpleNamespace(name=name)

    def play() -> Generator[Ready, Any, str]:
        for cell.round in range(first, rounds + 1):
            if cell.round == fails_in:
                raise ZeroDivisionError(name)
            yield Ready(store, cell.round)
        return name

    return Player(cell, play())


@pytest.mark.parametrize("order", [1, -1])
def test_a_failure_is_told_once_the_others_have_committed_its_round(
    monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    """If the process is killed before that, the round is played again by all, with the one that fails. Of
    four, d stands at another round when they go on, and fails at once; c fails in a round that nobody else
    plays."""
    events: list[str] = []
    monkeypatch.setattr(
        lockstep,
        "seal_all",
        lambda ready: events.extend(sorted(f"{each.store.name}{each.round}" for each in ready)),
    )
    players = [
        player("a", 3),
        player("b", 3, fails_in=2),
        player("c", 4, fails_in=4),
        player("d", 4, fails_in=3, first=3),
    ][::order]
    drive(Idle(), players, failed=lambda fallen: events.append(f"{fallen.cell.label} failed"))
    assert events == ["a1", "b1", "c1", "a2", "c2", "b failed", "a3", "c3", "d failed", "c failed"]
    assert {p.cell.label: p.result for p in players} == {"a": "a", "b": None, "c": None, "d": None}
