"""Who never answers costs the deadline a few times, not for ever."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.deploy.deadlines import Deadlines, paused  # noqa: E402
from holdfast.deploy.ledger import Entry  # noqa: E402


def entry(number: int, kind: str, client: int | None = None, round: int = 1, **what: object) -> Entry:
    return Entry(number, "2026-11-18T00:00:00+00:00", kind, client, round, what)


def test_after_a_miss_a_client_has_a_few_times_what_it_has_needed() -> None:
    deadlines = Deadlines(300.0)
    deadlines.answered(0, "train", 10.0)
    deadlines.answered(1, "train", 2.0)
    assert deadlines.of(0, "train") == 300.0  # who has not failed yet has it all
    assert deadlines.missed(0, round=2) is None
    assert deadlines.of(0, "train") == 40.0 and deadlines.of(1, "train") == 300.0
    assert deadlines.missed(1, round=2) is None
    assert deadlines.of(1, "train") == 20.0  # at least
    assert deadlines.missed(2, round=2) is None
    assert (
        deadlines.of(2, "train") == 40.0 and deadlines.of(2, "score") == 300.0
    )  # as the slowest of the others; nobody has scored yet
    deadlines.answered(0, "train", 100.0)
    deadlines.missed(0, round=3)
    assert deadlines.of(0, "train") == 300.0  # never more than the deadline


def test_pauses_get_longer_until_an_answer_comes() -> None:
    deadlines = Deadlines(300.0)
    assert [deadlines.missed(5, round=1) for _ in range(3)] == [None, None, 3]
    assert [deadlines.is_paused(5, round) for round in (1, 2, 3)] == [True, True, False]
    assert deadlines.missed(5, round=1) is None and deadlines.until == {
        5: 3
    }  # one outage is one pause, however often it is asked
    assert deadlines.missed(5, round=3) == 6 and deadlines.missed(5, round=6) == 11
    assert deadlines.is_paused(5, 10) and not deadlines.is_paused(4, 10)
    for round in range(100, 1000, 100):
        until = deadlines.missed(5, round)
    assert until == 965  # 64 rounds at most
    deadlines.answered(5, "train", 1.0)
    assert (
        not deadlines.is_paused(5, 901)
        and deadlines.of(5, "train") == 300.0
        and deadlines.missed(5, round=901) is None
    )


def test_a_client_has_the_whole_deadline_after_a_pause() -> None:
    """An honest client may have become slower than four times what the others need; it must not be locked out
    for ever."""
    deadlines = Deadlines(300.0)
    deadlines.answered(0, "train", 3.0)
    assert [deadlines.missed(1, round=1) for _ in range(2)] == [None, None] and deadlines.of(
        1, "train"
    ) == 20.0
    assert deadlines.missed(1, round=2) == 4 and deadlines.of(1, "train") == 300.0


def test_a_server_that_is_started_again_remembers_the_pauses_of_its_run() -> None:
    deadlines = Deadlines(300.0)
    told = [
        entry(0, "pause", 1, until=9, pauses=3),
        entry(1, "pause", 2, until=9, pauses=1),
        entry(2, "round", took_part=[0, 2]),
    ]
    deadlines.remember(told)
    assert deadlines.is_paused(1, 8) and not deadlines.is_paused(2, 8)
    assert deadlines.missed(1, round=9) == 18 and deadlines.missed(2, round=9) is None
    another = Deadlines(300.0)
    another.remember([*told, entry(3, "start", round=0, run="b")])
    assert not another.is_paused(1, 8)
    assert paused(told) == {1: 9} and paused([*told, entry(3, "start", round=0, run="b")]) == {}
