from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.aggregators.mean import Mean
from holdfast.wrappers.crfl import CRFL
from tests.checks.aggregator_cases import context_of
from tests.helpers import assert_same, everything, run_all

MODEL = torch.tensor([3.0, 4.0], dtype=torch.float64)
CTX = context_of(MODEL[None])


def after(round: int, **settings: float) -> torch.Tensor:
    rule = CRFL(**{"noise": 0.0, **settings})(Mean())
    return rule.after_step(MODEL, replace(CTX, round=round))


def test_the_model_is_shortened_to_a_length_that_grows_with_the_rounds() -> None:
    torch.testing.assert_close(after(1, start=2.0, growth=0.5), MODEL / 2)  # 2.5 of 5
    torch.testing.assert_close(after(4, start=2.0, growth=0.5), MODEL * 0.8)
    torch.testing.assert_close(after(9, start=2.0, growth=0.5, largest=3.0), MODEL * 0.6)
    assert torch.equal(after(6, start=2.0, growth=0.5), MODEL)  # its own length
    assert torch.equal(CRFL().after_step(MODEL * 0, replace(CTX, round=1)), CRFL().noise_of(MODEL, CTX.key))


def test_the_rule_sees_the_updates_as_they_are() -> None:
    x, w = torch.tensor([[1.0, 30.0], [3.0, 10.0]]), torch.tensor([0.5, 0.5])
    assert CRFL()(Mean())(x, w, {}, context_of(x)).value.tolist() == [2.0, 20.0]


def test_in_a_run_the_whole_model_is_shortened_and_runs_alone_are_runs_together(tmp_path: Path) -> None:
    wraps = [[{"name": "crfl", "start": 0.5, "growth": 0, "noise": noise}] for noise in (0.0, 0.1)]
    tables = [
        {"aggregator": {"name": "mean", "wrap": wrap}, "train": {"rounds": 2, "server_lr": 2.0}}
        for wrap in wraps
    ]
    together = run_all(tables, tmp_path / "together")
    assert float(together[0].state()["model"].norm()) == pytest.approx(0.5)
    assert float(together[1].state()["model"].norm()) > 0.6
    alone = run_all(tables[1:], tmp_path / "alone")
    assert_same(everything(together[1]), everything(alone[0]))
