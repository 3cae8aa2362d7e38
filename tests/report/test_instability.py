from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from holdfast.report.instability import advice, unstable
from holdfast.report.read_runs import RunRecord


def run(losses: list[float], status: str = "finished", attack: Any = None) -> RunRecord:
    return cast(
        RunRecord,
        SimpleNamespace(
            label="fedavg",
            path=Path("x"),
            config={"attack": attack, "train": {"lr": 5.0}},
            run_status=SimpleNamespace(status=status),
            curve=lambda metric: list(enumerate(losses, start=1)) if metric == "loss/train" else [],
        ),
    )


def test_a_training_loss_that_explodes_is_reported_although_it_is_finite() -> None:
    assert unstable([run([2.3, 178.4, 1.1])]) == [
        "the training loss reached 178 in round 2, so training is unstable; lower train.lr (now 5)."
    ]
    two = unstable([run([2.0]), run([30.0]), run([40.0])])
    assert two[0].startswith("fedavg: the training loss reached 30 in round 1") and "1 more such." in two[0]


def test_runs_under_attack_and_diverged_runs_are_not_called_unstable() -> None:
    assert unstable([run([2.3]), run([99.0], "diverged"), run([99.0], attack={"name": "ipm"}), run([])]) == []


def test_advice_under_attack_names_the_attack() -> None:
    said = advice({"attack": {"name": "ipm"}, "train": {"lr": 0.1}})
    assert said.startswith("use a robust aggregator or method against ipm") and "train.lr (now 0.1)" in said
