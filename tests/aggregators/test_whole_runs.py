"""Rules inside experiments: they train, what they remember survives a resume, and rounds with too few clients are counted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.results import Run
from holdfast.session import resume
from holdfast.store import Store
from tests.checks.test_aggregators import RULES
from tests.helpers import assert_same, everything, play


def test_every_rule_in_one_run(tmp_path: Path) -> None:
    runs = play([{"aggregator": name, "data": {"root": 20}} for name in RULES], tmp_path)
    for name, run in zip(RULES, runs, strict=True):
        end = everything(run)
        assert torch.isfinite(end["server/model"]).all(), name
        if name != "foolsgold":  # may trust one client alone
            assert run.final["fallback_rounds"] == 0, name


def test_rounds_with_too_few_answers_are_counted(tmp_path: Path) -> None:
    train = {"rounds": 6, "dropout": 0.3, "local_steps": 1}
    run = play([{"aggregator": {"name": "krum", "f": 1}, "train": {**train, "dtype": "float64"}}], tmp_path)[0]
    assert 0 < run.final["fallback_rounds"] <= 6


@pytest.mark.parametrize("name", ["foolsgold", "centered-clip"])
def test_what_a_rule_remembers_survives_a_stop(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"aggregator": name, "train": {"rounds": 4, "participation": 0.4, "local_epochs": 1, "batch_size": 5}}
    whole = everything(play([table], tmp_path / "whole")[0])
    commit, calls = Store.write_head, itertools.count()

    def stop(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:  # rounds 0, 1 and 2 are committed
            raise KeyboardInterrupt
        return commit(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "write_head", stop)
        play([table], tmp_path / "cut")
    assert Run(tmp_path / "cut").round == 2
    resume(tmp_path / "cut")
    assert_same(whole, everything(Run(tmp_path / "cut")), tolerance=0)
    memory = {"foolsgold": "server/aggregator/history", "centered-clip": "server/aggregator/centre"}[name]
    assert whole[memory].any()
