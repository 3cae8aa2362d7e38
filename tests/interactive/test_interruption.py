"""Ctrl-C: what is committed is returned, with a line that says how to continue; a second one raises."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.core.errors import RunError
from holdfast.experiment.runner import RunCallbacks
from holdfast.interactive.interruption import stoppable
from tests.experiment.kills import bits
from tests.experiment.sessions import TINY
from tests.interactive.own_model import Net, blobs


def press_in_round(number: int) -> RunCallbacks:
    def moved(experiment: Any) -> None:
        if experiment.run_context.round == number:
            os.kill(os.getpid(), signal.SIGINT)

    return RunCallbacks(moved=moved)


def test_a_run_keeps_its_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = holdfast.run(TINY, out=tmp_path / "cut", watch=press_in_round(2))
    assert (run.status, run.round, len(run.metrics)) == ("begun", 1, 1)
    assert "round 1 of 2, not finished, accuracy" in repr(run)
    assert capsys.readouterr().err == f"interrupted; holdfast.resume({str(run.path)!r}) continues the run\n"
    whole = holdfast.run(TINY, out=tmp_path / "whole")
    again = holdfast.resume(run.path)
    assert again.final["accuracy"] == whole.final["accuracy"] and bits(run.path) == bits(whole.path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_advice_names_the_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {**TINY, "data": holdfast.Data(clients=blobs(), keep=False)}
    run = holdfast.run(given, model=Net, out=tmp_path / "cut", watch=press_in_round(2))
    advice = f"holdfast.resume({str(run.path)!r}, model=Net, data=data)"
    assert capsys.readouterr().err == f"interrupted; {advice} continues the run\n"
    with pytest.raises(RunError, match=re.escape(f"`{advice}` in Python continues it")):
        print(run.final)
    with pytest.warns(UserWarning, match="goes on with Python objects"):
        assert holdfast.resume(run.path, model=Net, data=blobs()).status == "finished"


def test_a_sweep_keeps_its_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {**TINY, "sweep": {"seed": [0, 1]}}
    sweep = holdfast.sweep(given, out=tmp_path / "s", watch=press_in_round(2))
    assert [(cell.status, cell.round) for cell in sweep] == [("begun", 1)] * 2
    assert "the same call with out=" in capsys.readouterr().err
    assert [cell.status for cell in holdfast.sweep(given, out=tmp_path / "s")] == ["finished"] * 2


def test_before_the_first_commit_there_is_nothing_to_return(tmp_path: Path) -> None:
    def planned(experiments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    for call in (
        lambda **given: holdfast.run(TINY, **given),
        lambda **given: holdfast.sweep(TINY, seed=[0, 1], **given),
    ):
        with pytest.raises(KeyboardInterrupt, match="nothing was saved"):
            call(out=tmp_path / "run", watch=RunCallbacks(planned=planned))
        assert not (tmp_path / "run").exists()


def test_a_second_one_raises() -> None:
    with pytest.raises(KeyboardInterrupt), stoppable(lambda: "no matter"):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_caller_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with stoppable(lambda: "no matter"):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]
