"""How memory is shared out before a run: by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.experiment import planner
from holdfast.experiment.build import shared_samples
from holdfast.experiment.loop import Experiment
from holdfast.local.plan import Plan
from holdfast.local.plan_choice import Forecast
from tests.experiment.sessions import config

GPU = torch.device("cuda")  # only its name is used


def experiments(tmp_path: Path, *settings: dict[str, Any]) -> list[Experiment]:
    configs = [config(engine={"memory": "1GB"}, **sections) for sections in settings]
    stores = zip(configs, shared_samples(configs), strict=True)
    return [Experiment(given, tmp_path / str(i), "", samples) for i, (given, samples) in enumerate(stores)]


def alike(members: list[Experiment]) -> dict[str, list[Experiment]]:
    return {
        key: [e for e in members if e.run_context.plan_key == key]
        for key in dict.fromkeys(e.run_context.plan_key for e in members)
    }


def test_a_group_has_the_models_of_all_that_are_fused(tmp_path: Path) -> None:
    fused = experiments(tmp_path, {"method": "ditto"}, {"method": "ditto", "seed": 1}, {"method": "fedavg"})
    assert planner._groups(fused) == (
        2 * 4 * 2,
        4,
    ), "two experiments of four clients with two models each; four clients"


def test_the_servers_own_data_is_one_more_in_the_group(tmp_path: Path) -> None:
    fused = experiments(
        tmp_path, {"method": "fedavg"}, {"method": "fedavg", "aggregator": "fltrust", "data": {"root": 10}}
    )
    assert planner._groups(fused) == (4 + 4 + 1,)


def test_on_a_gpu_networks_share_the_memory_by_what_they_would_take(tmp_path: Path) -> None:
    small, large = {"method": "fedavg"}, {"method": "ditto", "model": {"name": "mlp", "hidden": 400}}
    members = experiments(tmp_path, small, large)
    shares = planner._memory(alike(members), GPU, "host")
    row = [planner._row(experiment) for experiment in members]
    wanted = [4 * row[0], 8 * row[1]]
    assert row[1] > 10 * row[0] > 0
    assert list(shares.values()) == [10**9 * part // sum(wanted) for part in wanted]
    assert planner._memory(alike(members[:1]), GPU, "host") == {members[0].run_context.plan_key: 10**9}, (
        "one alone has all of it"
    )
    assert set(planner._memory(alike(members), torch.device("cpu"), "host").values()) == {10**9}, (
        "a CPU's stacks come and go"
    )


@pytest.mark.parametrize(
    ("method", "train", "steps"),
    [
        # 4 clients of 14 training samples each, in batches of 5: two whole ones and one of 4
        ("fedavg", {"local_epochs": 2, "rounds": 3}, 4 * 3 * 2 * 3),
        ("fedavg", {"local_epochs": 2, "rounds": 3, "drop_last": True}, 4 * 2 * 2 * 3),
        ("fedavg", {"local_steps": 7, "rounds": 3}, 4 * 7 * 3),
        ("ditto", {"local_epochs": 2, "rounds": 3}, 2 * 4 * 3 * 2 * 3),
        ("ditto", {"local_epochs": 2, "rounds": 3, "participation": 0.5}, 2 * 2 * 3 * 2 * 3),
    ],
)
def test_the_announced_steps_by_hand(tmp_path: Path, method: str, train: dict[str, Any], steps: int) -> None:
    """Partial batches are steps too, and a client of Ditto trains two models."""
    (experiment,) = experiments(
        tmp_path, {"method": method, "train": train, "data": {"split": {"train": 0.7, "test": 0.3}}}
    )
    assert experiment.run_context.federation.train.counts.tolist() == [14] * 4
    assert planner.client_steps(experiment) == steps
    told = Forecast(Plan("loop"), {"loop": 500_000.0}, 0)
    assert f"expect about {steps / 2:.1f} s of training" in planner.sentence(told, [experiment], 1)
