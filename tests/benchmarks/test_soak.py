"""The short form of `make soak`: a run and a sweep are killed a few times by the soak's own code.
Federations: tests/deploy/test_up.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.soak import local
from benchmarks.soak.__main__ import shares
from benchmarks.soak.compare import content, differences
from benchmarks.soak.course import Course
from benchmarks.soak.disk import garble_unsealed
from benchmarks.soak.memory import Life
from benchmarks.soak.record import BEGIN, END, Disturbance, Outcome, write_into
from holdfast.storage.store import Store
from tests.helpers import run_all


@pytest.mark.slow
@pytest.mark.parametrize("part, kills, rounds", [("run", 3, 24), ("sweep", 3, 8)])
def test_what_is_disturbed_ends_as_if_nothing_had_happened(
    tmp_path: Path, part: str, kills: int, rounds: int
) -> None:
    """The process, worker processes and both are killed, at files of the seed's choice."""
    course, outcome = Course(11, tmp_path, Console(quiet=True)), Outcome(part)
    try:
        local.soak(course, outcome, kills, rounds, others=0)
    finally:
        course.end_all()
    assert outcome.failures == [] and [one.broken for one in outcome.disturbances if one.broken] == []
    assert outcome.kills == kills and all(
        one.moment and one.seconds is not None for one in outcome.disturbances
    )
    assert {one.victim for one in outcome.disturbances} == set(local.Work(part, rounds).victims())


def test_a_difference_is_found(tmp_path: Path) -> None:
    """The comparison itself: equal runs have none; one other bit, and one lost round, are named."""
    (a,), (b,) = (run_all([{"method": "ditto"}], tmp_path / name) for name in ("a", "b"))
    assert differences(content(a.path), content(b.path)) == []
    (b.path / "parts" / "000002.json").unlink()
    assert "parts" in differences(content(a.path), content(b.path))
    records = bytearray((a.path / "rows" / "records").read_bytes())
    before = content(a.path)
    for place in range(0, len(records), 8):
        records[place] ^= 1
    (a.path / "rows" / "records").write_bytes(records)
    assert any(name.startswith("client ") for name in differences(content(a.path), before))


def test_what_is_committed_survives_the_rubbish_of_a_power_cut(tmp_path: Path) -> None:
    (run,) = run_all([{"method": "ditto"}], tmp_path / "run")
    before, last = content(run.path), Store(run.path).round()
    (run.path / "state" / f"{last + 1:06d}.safetensors").write_bytes(b"prepared")
    assert garble_unsealed(run.path, last, random.Random(1)) >= 1
    assert differences(content(run.path), before) == []


def test_growing_memory_is_seen() -> None:
    flat, grown = (Life("SuperLink", [(n, int(1e8 + n * step)) for n in range(40)]) for step in (1e4, 1e6))
    assert not flat.grew() and grown.grew()


def test_a_record_replaces_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{BEGIN}\nold\n{END}\nrest\n")
    for record in ("first", "second"):
        write_into(page, record)
    assert page.read_text() == f"# Title\n{BEGIN}\nsecond\n{END}\nrest\n"
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="has not exactly one line"):
        write_into(page, "lost")


def test_kills_are_shared_out_and_a_broken_promise_is_no_success(tmp_path: Path) -> None:
    assert shares(100, ["run", "sweep", "federation"]) == {"run": 40, "sweep": 30, "federation": 30}
    assert all(sum(shares(kills, ["sweep", "federation"]).values()) == kills for kills in range(1, 12))
    first, second, other = (
        Course(seed, tmp_path, Console(quiet=True)).chance("run").random() for seed in (1, 1, 2)
    )
    assert first == second != other
    outcome = Outcome("run", [Disturbance("run", "kill", "the process")])
    assert not outcome.held  # it has not come to its end
    outcome.finished = True
    assert outcome.held and outcome.kills == 1
    outcome.disturbances[0].broken = "it was lost"
    assert not outcome.held
