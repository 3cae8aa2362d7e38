"""C-PFL's Table 6 run at its smallest, and how its other tables are planned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pandas as pd
import pytest

from holdfast.methods.c_pfl import CPfl
from holdfast.reproduction.experiments import StudyGrid, StudyRequest
from holdfast.reproduction.measures import measured
from holdfast.reproduction.outcome import reproduce
from holdfast.reproduction.study import find, read
from holdfast.reproduction.values import printed
from holdfast.results.run import Run


def test_table_6_tunes_heads_after_the_last_round(tmp_path: Path) -> None:
    plain = (
        ("engine.plan", "vmap"),
        ("engine.threads", 1),
        ("engine.workers", 1),
    )  # trials would take longer than the rounds
    outcome = reproduce(
        find("c-pfl", "table 6")[0], StudyRequest(scale="smoke", changes=plain), tmp_path / "t"
    )
    places = [{"dataset": "MNIST", "method": "C-PFL", "epochs": e} for e in ("0", "5", "10", "15", "20")]
    places.append(
        {"dataset": "MNIST", "method": "FedAvg", "epochs": "0"}
    )  # beside the common model; it has no head to tune
    figures = [outcome.ours.mean("average test accuracy(%)", at) for at in places]
    assert (
        outcome.missing == 0
        and len(outcome.finished_runs) == 6
        and all(0 <= cast(float, value) <= 100 for value in figures)
    )
    by_epochs = {
        made["tune_epochs"]: run
        for run in outcome.finished_runs
        if (made := run.manifest["config"]["method"])["name"] == "c-pfl"
    }
    common = {run.metrics["accuracy"].iloc[-2] for run in by_epochs.values()}
    assert len(common) == 1  # the same experiment until the heads are tuned
    assert by_epochs[20].final["accuracy/personal"] > by_epochs[0].final["accuracy/personal"]
    untested, gains, beyond, below, also_untested = (ours for ours, _ in outcome.claim_results)
    assert untested.words == also_untested.words == "not tested"  # they are about CIFAR
    assert gains.holds and gains.cases == beyond.cases == below.cases == 1
    assert all(in_print.holds in (None, True) for _, in_print in outcome.claim_results)


def test_every_method_of_a_column_has_the_same_data() -> None:
    cells = StudyGrid(read("c-pfl/table-3"), StudyRequest(scale="full")).planned_runs
    dealt: dict[tuple[str, str], set[str]] = {}
    for cell in cells:
        dealt.setdefault((cell.at["split"], cell.at["dataset"]), set()).add(str(cell.config.data))
    assert len(cells) == 88 and len(dealt) == 8 and all(len(same) == 1 for same in dealt.values())
    hundred = {
        cell.config.data.partition["classes_per_client"]
        for cell in cells
        if cell.at["split"] == "pathological" and cell.at["dataset"] == "CIFAR-100"
    }
    assert hundred == {10}


@pytest.mark.parametrize("key", ["c-pfl/table-3", "c-pfl/fig-4", "c-pfl/table-6"])
def test_other_readings_of_the_threshold_run_on_request(key: str) -> None:
    """All scores move it by default; no committee stands beside them in Table 3."""

    def readings(*only: str) -> dict[str, object]:
        made = {
            cell.at["method"]: cell.config.parts().method
            for cell in StudyGrid(read(key), StudyRequest(scale="full", only=only)).planned_runs
        }
        return {label: m.committee and m.committee.scores for label, m in made.items() if isinstance(m, CPfl)}

    assert readings() == {"C-PFL": "all", **({"no committee": False} if key == "c-pfl/table-3" else {})}
    asked = readings("method=C-PFL,C-PFL (admitted),C-PFL (members)")
    assert asked == {"C-PFL": "all", "C-PFL (admitted)": "admitted", "C-PFL (members)": "members"}


def test_the_milder_split_is_a_column_only_on_request() -> None:
    study = read("c-pfl/table-3")
    assert {cell.at["split"] for cell in StudyGrid(study, StudyRequest(scale="full")).planned_runs} == {
        "practical",
        "pathological",
    }
    mild = StudyGrid(study, StudyRequest(scale="full", only=("split=most labels",)))
    assert {cell.config.data.partition["beta"] for cell in mild.planned_runs} == {0.5}


def test_the_figures_that_figure_4_states_in_words() -> None:
    study = read("c-pfl/fig-4")
    found = printed(study, StudyGrid(study, StudyRequest(scale="full")).labels)
    assert study.name == "Fig. 4"
    assert (
        found.mean("accuracy drop (points)", {"dataset": "CIFAR-10", "noisy": "40%", "method": "FedBABU"})
        == 9.89
    )
    benign = next(
        cell for cell in StudyGrid(study, StudyRequest(scale="full")).planned_runs if cell.at["noisy"] == "0%"
    )
    assert benign.config.attack is None


def test_the_median_round_and_not_the_tuning_after_it() -> None:
    frame = pd.DataFrame(
        {
            "round": [1, 2, 3, 4],
            "seconds/client": [9.0, 2.0, 3.0, 50.0],
            "seconds/server": [1.0, 0.5, 1.0, 0.0],
        }
    )
    run = cast(Run, SimpleNamespace(metrics=frame, manifest={"config": {"train": {"rounds": 3}}}))
    assert measured("seconds-of-a-round")(run) == pytest.approx(4.0)
