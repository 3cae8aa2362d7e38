"""FedCOM: its tables, run for seconds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from holdfast.reproduction.experiments import StudyGrid, StudyRequest
from holdfast.reproduction.measures import measured
from holdfast.reproduction.outcome import reproduce
from holdfast.reproduction.study import find, read

METHODS = ("local-only", "FedAvg", "Ditto", "FedCOM")


def test_table_1(tmp_path: Path, quick_disk: None) -> None:
    outcome = reproduce(find("fedcom", "1")[0], StudyRequest(scale="smoke"), tmp_path / "out")
    assert len(outcome.grid.planned_runs) == 4 and outcome.missing == 0
    ours = {
        m: outcome.ours.mean("average accuracy (fraction)", {"dataset": "MNIST", "method": m})
        for m in METHODS
    }
    assert all(found is not None and 0 < found <= 1 for found in ours.values())
    printed = {
        m: outcome.printed.mean("average accuracy (fraction)", {"dataset": "MNIST", "method": m})
        for m in METHODS
    }
    assert printed == {"local-only": 0.9567, "FedAvg": 0.6095, "Ditto": 0.9661, "FedCOM": 0.9738}
    assert [(ours.cases, said.words) for ours, said in outcome.claim_results] == [(1, "holds")] * 3


def test_table_2(tmp_path: Path, quick_disk: None) -> None:
    """Ten clients decide in each of three rounds: a share of 30 decisions, by update and by gradient."""
    outcome = reproduce(find("fedcom", "II")[0], StudyRequest(scale="smoke", only=("x=5",)), tmp_path / "out")
    for signal in ("update", "gradient"):
        at = {"dataset": "MNIST", "signal": signal, "x": "5"}
        found = outcome.ours.mean("matching accuracy(%)", at)
        assert found is not None and found * 0.3 == pytest.approx(round(found * 0.3)) and 0 <= found <= 100
        assert outcome.printed.mean("matching accuracy(%)", at) == 98.5
    assert {run.manifest["config"]["method"]["signal"] for run in outcome.finished_runs} == {
        "update",
        "gradient",
    }


@pytest.mark.parametrize(
    ("table", "cells"), [("fedcom/table-1", 3 * 4 * 3), ("fedcom/table-2", 3 * 2 * 3 * 3)]
)
def test_rounds_by_dataset_and_three_seeds(table: str, cells: int) -> None:
    grid = StudyGrid(read(table), StudyRequest(scale="full"))
    assert {(cell.at["dataset"], cell.config.train.rounds) for cell in grid.planned_runs} == {
        ("MNIST", 20),
        ("FMNIST", 30),
        ("CIFAR-10", 30),
    }
    assert grid.seeds == 3 and len(grid.planned_runs) == len(grid.to_run()) == cells


def test_how_fast_accuracy_rises() -> None:
    """The first tenth of 30 evaluations is three of them; of 4 it would be one, and two are taken."""
    run: Any = SimpleNamespace(metrics=pd.DataFrame({"accuracy": [0.1, 0.2, 0.6, *[0.9] * 27]}))
    assert measured("accuracy/early")(run) == pytest.approx(0.3)
    assert measured("accuracy/over-rounds")(run) == pytest.approx((0.9 + 27 * 0.9) / 30)
    short: Any = SimpleNamespace(metrics=pd.DataFrame({"accuracy": [0.1, None, 0.3, 0.8, 0.8]}))
    assert measured("accuracy/early")(short) == pytest.approx(0.2)
