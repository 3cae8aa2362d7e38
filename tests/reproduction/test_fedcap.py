"""FedCAP's studies: one table is run, the measures of Fig. 3 by hand."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest

from holdfast.reproduction.experiments import StudyRequest
from holdfast.reproduction.measures import measured
from holdfast.reproduction.outcome import reproduce
from holdfast.reproduction.page import write_reproduction
from holdfast.reproduction.study import keys, read
from holdfast.reproduction.values import printed
from holdfast.results.run import Run

ENGINE = (("engine.plan", "vmap"), ("engine.threads", 1), ("engine.workers", 1))


def test_table_3_at_the_smallest_scale(tmp_path: Path) -> None:
    outcome = reproduce(read("fedcap/table-3"), StudyRequest(scale="smoke", changes=ENGINE), tmp_path / "out")
    assert outcome.missing == 0 and len(outcome.finished_runs) == 7
    values = outcome.ours
    for attack in values.labels["attack"]:
        at = {"dataset": "CIFAR-10", "method": "FedCAP", "attack": attack}
        accuracy, missed = values.mean("TAcc(%)", at), values.mean("FNR(%)", at)
        assert accuracy is not None and 10 < accuracy <= 100
        assert missed is None if attack == "benign" else missed is not None and 0 <= missed <= 100
    printed = outcome.printed
    assert printed.mean("TAcc(%)", {"dataset": "CIFAR-10", "method": "FedCAP", "attack": "benign"}) == 85.6
    assert [finding.holds for _, finding in outcome.claim_results] == [True, True, True, True]  # in print
    assert all(finding.cases for finding, _ in outcome.claim_results)
    assert outcome.grid.substitutes == ["digits for all data"]


def test_table_4_scores_rows_without_personal_training_by_the_customised_model_alone(tmp_path: Path) -> None:
    """As the released code does; how far such a row would be with the locally trained model stands beside
    it."""
    request = StudyRequest(scale="smoke", changes=ENGINE, only=("attack=IPM",))
    outcome = reproduce(read("fedcap/table-4"), request, tmp_path / "out")
    shown = (write_reproduction(outcome).parent / "table.md").read_text()
    apart = 0
    for row, figure in zip("12345", ("customised", "tacc", "customised", "tacc", "tacc"), strict=True):
        run = next(run for run in outcome.finished_runs if f"({row})" in run.manifest["label"])
        label = next(label for label in outcome.study.axes["method"] if label.startswith(f"({row})"))
        at = {"dataset": "CIFAR-10", "attack": "IPM", "method": label}
        score, either = (outcome.ours.mean(metric, at) for metric in outcome.study.metrics)
        assert score == 100 * run.final[f"accuracy/{figure}"] and f"| TAcc(%) {label} |" in shown
        assert either == (100 * run.final["accuracy/tacc"] if row in "13" else None)
        apart += either is not None and either != score
    assert apart  # the scoring matters


@pytest.mark.parametrize("key", [key for key in keys() if key.startswith("fedcap/")])
def test_the_metric_of_each_table(key: str) -> None:
    """TAcc is the same figure everywhere but for Fig. 7's FedAvg-FT, which the released script takes after
    its training, and Table IV's rows without personal training. Beside the mean over clients, tables with
    clients of unequal sizes have the pooled figure."""
    study = read(key)
    figures = {name: metric.figure for name, metric in study.metrics.items()}
    assert (
        "accuracy/better_of" not in figures.values()
        and figures.get("TAcc(%)", "accuracy/tacc") == "accuracy/tacc"
    )
    other = (
        {label: one.figure for one in study.metrics["TAcc(%)"].override for label in one.when["method"]}
        if "TAcc(%)" in figures
        else {}
    )
    alone = [label for label in study.axes.get("method", {}) if label.startswith(("(1)", "(3)"))]
    assert other == (
        {"FedAvg-FT": "accuracy/personal"}
        if key == "fedcap/fig-7"
        else dict.fromkeys(alone, "accuracy/customised")
    )
    pooled = study.printed is not None and "TAcc(%)" in figures and "WISDM" in study.axes["dataset"]
    assert figures.get("TAcc, pooled (%)") == ("accuracy/tacc/pooled" if pooled else None)
    if pooled:
        found = [dict(at) for name, at in printed(study, study.axes).by_place if name == "TAcc, pooled (%)"]
        assert found and {at["dataset"] for at in found} == {"WISDM"}


def test_rounds_to_80_are_of_tacc() -> None:
    rows = [(1, 0.5), (2, None), (3, 0.8), (4, 0.7), (5, 0.9)]
    run = types.SimpleNamespace(metrics=pd.DataFrame(rows, columns=["round", "accuracy/tacc"]))
    assert measured("rounds-to-tacc-80")(cast(Run, run)) == 3
    run.metrics = run.metrics[:2]
    assert measured("rounds-to-tacc-80")(cast(Run, run)) is None
    assert read("fedcap/table-5").metrics["R2Acc(80%) round"].measure == "rounds-to-tacc-80"


def test_fig_3_draws_lengths_of_both_kinds_of_client(tmp_path: Path) -> None:
    outcome = reproduce(
        read("fedcap/fig-3"),
        StudyRequest(scale="smoke", changes=ENGINE, only=("attack=benign,MR",)),
        tmp_path / "out",
    )
    page = write_reproduction(outcome).read_text()
    assert (
        "norms over the rounds" in page
        and "MR malicious" in page
        and "MR benign" in page
        and "benign benign" in page
    )
    at = {"dataset": "CIFAR-10", "method": "FedAvg", "attack": "MR"}
    first, benign = (
        outcome.ours.mean("malicious, first round", at),
        outcome.ours.mean("benign, last round with any", at),
    )
    assert (
        first is not None and benign is not None and first > 3 * benign
    )  # ten times an honest one, and benign ones grow too
    assert outcome.ours.mean("malicious, first round", {**at, "attack": "benign"}) is None


def test_lengths_of_updates() -> None:
    rows = [(1, 0, False, 1.0), (1, 1, True, 2.0), (1, 2, True, 4.0), (2, 0, False, 5.0), (2, 1, True, 30.0)]
    rows += [(3, 1, True, float("inf")), (3, 2, True, 6.0)]
    run = types.SimpleNamespace(
        table=lambda name: pd.DataFrame(rows, columns=["round", "client", "malicious", "value"])
    )
    read_off: dict[str, Any] = {
        name: measured(f"norm/{name}")(cast(Run, run))
        for name in ("malicious/first", "malicious/last", "malicious/growth", "benign/last")
    }
    assert read_off == {
        "malicious/first": 3.0,
        "malicious/last": 6.0,
        "malicious/growth": 10.0,
        "benign/last": 5.0,
    }
    benign = types.SimpleNamespace(
        table=lambda name: pd.DataFrame(rows[:1], columns=["round", "client", "malicious", "value"])
    )
    assert measured("norm/malicious/growth")(cast(Run, benign)) is None
