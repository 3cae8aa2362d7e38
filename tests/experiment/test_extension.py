"""More rounds for a run: it becomes the run that had them from the start, or says why it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.core.errors import ConfigError
from holdfast.core.reading import read_json
from holdfast.experiment.manifest import read_manifest
from tests.experiment.kills import bits
from tests.experiment.sessions import TINY


def given(rounds: int, **sections: Any) -> dict[str, Any]:
    return {**TINY, "train": {**TINY["train"], "rounds": rounds, "participation": 0.5}, **sections}


@pytest.mark.parametrize(
    "sections",
    [
        {"method": "ditto"},
        {"method": "fedcap", "attack": {"name": "ipm", "fraction": 0.25}},
        {"server": "fedadam", "method": "fedavg", "schedule": {"name": "step", "every": 1}},
    ],
)
def test_an_extended_run_is_the_longer_run(tmp_path: Path, sections: dict[str, Any]) -> None:
    long = holdfast.run(given(4, **sections), out=tmp_path / "long")
    holdfast.run(given(2, **sections), out=tmp_path / "short")
    run = holdfast.resume(tmp_path / "short", rounds=4)
    assert bits(run.path) == bits(long.path) and run.status == "finished"
    same = [name for name in long.metrics if not name.startswith("seconds")]
    assert run.metrics[same].equals(long.metrics[same])
    assert {k: v for k, v in run.final.items() if not k.startswith("seconds")} == {
        k: v for k, v in long.final.items() if not k.startswith("seconds")
    }
    manifest = read_manifest(run.path)
    assert manifest["config"] == long.manifest["config"]
    (change,) = manifest["extended"]
    assert (change["from"], change["to"], change["after"]) == (2, 4, 2)
    assert (read_json(run.path / "result.json") or {})["rounds"] == 4


def test_fewer_rounds_are_refused(tmp_path: Path) -> None:
    run = holdfast.run(given(2), out=tmp_path / "run")
    before = bits(run.path)
    with pytest.raises(
        ConfigError, match="was begun with 2 rounds, and rounds cannot be taken away; give 2 or"
    ):
        holdfast.resume(run.path, rounds=1)
    assert holdfast.resume(run.path, rounds=2).final == run.final and bits(run.path) == before


@pytest.mark.parametrize("rounds", ["5", 5.5])
def test_rounds_that_are_no_whole_number_are_refused(rounds: Any, tmp_path: Path) -> None:
    run = holdfast.run(given(1), out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"rounds: needs a whole number, such as 100, not"):
        holdfast.resume(run.path, rounds=rounds)
    assert holdfast.open(run.path).status == "finished"


def test_what_depends_on_the_number_of_rounds_is_refused(tmp_path: Path) -> None:
    """The folder stays as it was."""
    for name, sections, words in (
        ("tuned", {"method": "fedbabu"}, "'fedbabu' trains once more after the last round"),
        ("cosine", {"schedule": "cosine"}, "the schedule 'cosine' stretches over all rounds"),
    ):
        run = holdfast.run(given(2, **sections), out=tmp_path / name)
        with pytest.raises(ConfigError, match=f"^rounds: .*{words}.*; begin a new run with train.rounds = 3"):
            holdfast.resume(run.path, rounds=3)
        assert run.status == "finished" and "extended" not in read_manifest(run.path)
    fixed = {"schedule": {"name": "cosine", "length": 10}}
    holdfast.run(given(1, **fixed), out=tmp_path / "fixed")
    assert holdfast.resume(tmp_path / "fixed", rounds=2).round == 2


def test_a_kill_between_the_two_files_leaves_a_run_that_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = holdfast.run(given(2), out=tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.storage.store.Store.write_json", lambda self, name, content: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            holdfast.resume(run.path, rounds=3)
    assert run.status == "begun" and holdfast.resume(run.path).final["accuracy"] is not None
    assert holdfast.resume(run.path, rounds=3).round == 3


def test_a_sweep_is_extended_as_a_whole(tmp_path: Path) -> None:
    axes = {"seed": [0, 1]}
    long = holdfast.sweep(given(3), out=tmp_path / "long", **axes)
    short = holdfast.sweep(given(2), out=tmp_path / "short", **axes)
    with pytest.raises(ConfigError, match="is a cell of a sweep"):
        holdfast.resume(short[0].run.path, rounds=3)
    sweep = holdfast.resume(tmp_path / "short", rounds=3)
    assert [(cell.status, cell.round) for cell in sweep] == [("finished", 3)] * 2
    assert [bits(cell.run.path) for cell in sweep] == [bits(cell.run.path) for cell in long]
    assert [cell.final["accuracy"] for cell in holdfast.sweep(given(3), out=tmp_path / "short", **axes)] == [
        cell.final["accuracy"] for cell in long
    ]
    rounds = {"train.rounds": [1, 2]}
    holdfast.sweep({**TINY, "sweep": rounds}, out=tmp_path / "rounds")
    with pytest.raises(ConfigError, match="differ in train.rounds"):
        holdfast.resume(tmp_path / "rounds", rounds=3)
