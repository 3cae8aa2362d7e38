"""Rules inside experiments: they train, what they remember survives a resume, and rounds with too few clients
are counted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.experiment.loop import Experiment
from holdfast.results.run import Run
from holdfast.storage.store import Store
from holdfast.sweeps.session import resume
from tests.checks.aggregator_cases import RULES
from tests.helpers import assert_same, everything, random_samples, run_all, tiny


def test_every_rule_in_one_run(tmp_path: Path) -> None:
    few = {"deepsight": {"samples": 10}}
    rules = [{"name": name, "f": 0, **few.get(name, {})} for name in RULES]
    runs = run_all([{"aggregator": rule, "data": {"root": 20}} for rule in rules], tmp_path)
    for name, run in zip(RULES, runs, strict=True):
        end = everything(run)
        assert torch.isfinite(end["server/model"]).all(), name
        if name != "foolsgold":  # may trust one client alone
            assert run.final["fallback_rounds"] == 0, name


def test_rounds_with_too_few_answers_are_counted(tmp_path: Path) -> None:
    train = {"rounds": 6, "dropout": 0.3, "local_steps": 1}
    run = run_all(
        [{"aggregator": {"name": "krum", "f": 1}, "train": {**train, "dtype": "float64"}}], tmp_path
    )[0]
    assert 0 < run.final["fallback_rounds"] <= 6


@pytest.mark.parametrize("name", ["foolsgold", "centered-clip"])
def test_the_memory_of_a_rule_survives_a_stop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {
        "aggregator": name,
        "train": {"rounds": 4, "participation": 0.4, "local_epochs": 1, "batch_size": 5},
    }
    whole = everything(run_all([table], tmp_path / "whole")[0])
    commit, calls = Store.write_head, itertools.count()

    def stop(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:  # rounds 0, 1 and 2 are committed
            raise KeyboardInterrupt
        return commit(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "write_head", stop)
        run_all([table], tmp_path / "cut")
    assert Run(tmp_path / "cut").round == 2
    resume(tmp_path / "cut")
    assert_same(whole, everything(Run(tmp_path / "cut")), tolerance=0)
    memory = {"foolsgold": "server/aggregator/history", "centered-clip": "server/aggregator/centre"}[name]
    assert whole[memory].any()


def test_a_ban_outlives_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "attack": {"name": "sign-flip", "scale": 50.0, "clients": (2,)},
        "detectors": ({"name": "norm", "threshold": 5},),
        "train": {"rounds": 3},
    }
    whole = run_all([table], tmp_path / "whole")[0]
    commit, calls = Store.write_head, itertools.count()

    def stop(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:  # rounds 0 and 1 are committed
            raise KeyboardInterrupt
        return commit(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "write_head", stop)
        run_all([table], tmp_path / "cut")
    resume(tmp_path / "cut")
    cut = Run(tmp_path / "cut")
    assert_same(everything(whole), everything(cut), tolerance=0)
    assert [cut.store.arrays(round)["cohort"].tolist() for round in (1, 2, 3)] == [
        [0, 1, 2, 3, 4],
        [0, 1, 3, 4],
        [0, 1, 3, 4],
    ]
    assert (cut.final["detection/dacc"], cut.final["detection/fpr"], cut.final["detection/fnr"]) == (
        1.0,
        0.0,
        0.0,
    )
    assert cut.final["detection/rounds"] == 1.0 and cut.final["detection/auc/norm/norm"] == 1.0


def test_a_server_whose_own_training_is_refused_falls_back(tmp_path: Path) -> None:
    """More samples make a longer way: the cap lets the clients pass, but not the server."""
    table = {"aggregator": "fltrust", "data": {"root": 400}, "train": {"rounds": 1, "norm_cap": 1.2}}
    run = run_all([table], tmp_path)[0]
    part = run.store.read_json("parts/000001.json")
    assert (
        part is not None
        and set(part["refused"]) == {"-1"}
        and part["fallback"]
        and part["metrics"]["refused"] == 0
    )
    assert run.store.arrays(1)["took_part"].tolist() == [0, 1, 2, 3, 4] and run.final["fallback_rounds"] == 1
    weights = run.store.arrays(1)["verdict/weights"]
    assert (weights > 0).all() and abs(float(weights.sum()) - 1) < 1e-9


def test_a_round_of_refused_replies_is_not_noted_as_a_round_without_replies(tmp_path: Path) -> None:
    run = run_all([{"train": {"rounds": 1, "norm_cap": 1e-9}}], tmp_path)[0]
    part = run.store.read_json("parts/000001.json")
    assert (
        part is not None
        and len(part["refused"]) == 5
        and part["notes"] == ["no update was used: the model stays as it was"]
    )


def test_a_cohort_size_that_follows_from_the_data_is_checked_too(tmp_path: Path) -> None:
    samples = random_samples(24, (4,))
    samples = replace(samples, user=torch.arange(24) % 4)
    data = {"clients": None, "partition": "by-user"}
    assert (
        Experiment(
            tiny(data=data, aggregator={"name": "krum", "f": 0}), tmp_path, samples=samples
        ).participation.cohort_size()
        == 4
    )
    with pytest.raises(
        ConfigError, match="'krum' needs .* but a cohort has n = 4 clients with f = 1; lower aggregator.f"
    ):
        Experiment(tiny(data=data, aggregator={"name": "krum", "f": 1}), tmp_path, samples=samples)
