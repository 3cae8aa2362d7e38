"""FedAS: a table that runs in seconds, under one evaluation and under the authors', and what is read off a
run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from holdfast.reproduction.experiments import StudyRequest
from holdfast.reproduction.measures import measured
from holdfast.reproduction.measures.fedas import pooled, weights_by_presence
from holdfast.reproduction.outcome import reproduce
from holdfast.reproduction.page import write_reproduction
from holdfast.reproduction.study import find


def test_table_3_under_one_evaluation_and_under_the_authors(tmp_path: Path, quick_disk: None) -> None:
    request = StudyRequest(scale="smoke", variant="both", only=("method=FedAvg-P,FedPer,FedAS",))
    outcome = reproduce(find("fedas", "table-3")[0], request, tmp_path / "out")
    assert (
        len(outcome.grid.planned_runs) == 2 * 3 * 2
        and outcome.missing == 0
        and "digits" in outcome.grid.substitutes[0]
    )
    assert len(outcome.ours.by_place) == 12 and all(
        0 < found.mean <= 100 for found in outcome.ours.by_place.values()
    )
    assert len(outcome.printed.by_place) == 6  # a variant is no axis of the paper

    shown = {
        (cell.at["method"], cell.at["variant"]): cell.config.evaluate.unselected
        for cell in outcome.grid.planned_runs
    }
    assert {pair for pair, unselected in shown.items() if unselected == "deliver"} == {
        ("FedAvg-P", "authors"),
        ("FedPer", "authors"),
    }

    def value(method: str, share: str, variant: str) -> float | None:
        return outcome.ours.mean(
            "best top-1 accuracy(%)", {"beta": "0.1", "P": share, "method": method, "variant": variant}
        )

    for method in ("FedAvg-P", "FedPer"):
        assert value(method, "1", "paper") == value(method, "1", "authors")  # no client is outside the cohort
    assert value("FedAvg-P", "0.2", "paper") != value("FedAvg-P", "0.2", "authors")

    best, loses, _, skew = outcome.claim_results
    assert best[0].cases == 4 and best[1].cases == 2 and best[1].holds
    assert loses[0].cases == 2 and loses[1].holds
    assert skew[0].words == "not tested"  # one skew alone


def alpha(*rows: tuple[int, int, float]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["round", "client", "value"])


def test_weights_are_compared_in_rounds_that_have_both_kinds() -> None:
    """Client 2 is there in one of three rounds: 0.2 against the mean of 0.3 and 0.5. Rounds 1 and 3 do not
    count."""
    frame = alpha((1, 0, 0.9), (1, 1, 0.1), (2, 0, 0.3), (2, 1, 0.5), (2, 2, 0.2), (3, 0, 0.5), (3, 1, 0.5))
    assert weights_by_presence(frame) == pytest.approx((0.4, 0.2))
    run: Any = SimpleNamespace(table=lambda name: {"alpha": frame}[name])
    assert measured("weight/ratio")(run) == pytest.approx(0.5)
    assert weights_by_presence(alpha((1, 0, 0.5), (1, 1, 0.5))) is None


def test_figures_over_rounds_and_traces() -> None:
    fim = alpha((1, 0, 2.0), (1, 1, 4.0), (2, 0, 9.0), (3, 0, 3.0), (3, 1, 9.0))
    run: Any = SimpleNamespace(
        metrics=pd.DataFrame({"accuracy/pooled": [0.2, None, 0.6, 0.4]}),
        table=lambda name: {"fim": fim}[name],
    )
    assert measured("pooled/best")(run) == 0.6 and measured("pooled/over-rounds")(run) == pytest.approx(0.4)
    assert (
        measured("fim/first")(run) == 3
        and measured("fim/last")(run) == 6
        and measured("fim/growth")(run) == 2
    )


def test_accuracies_of_clients_pooled() -> None:
    frame = pd.DataFrame({"samples": [1, 3], "before": [1.0, 0.6], "top": [0.0, 0.4], "random": [0.5, 0.5]})
    assert pooled(frame).to_dict() == pytest.approx({"before": 0.7, "top": 0.3, "random": 0.5})


def test_replaced_parameters_are_read_off_a_run(tmp_path: Path, quick_disk: None) -> None:
    outcome = reproduce(find("fedas", "fig-3")[0], StudyRequest(scale="smoke"), tmp_path / "out")
    shown = {metric: outcome.ours.mean(metric, {"method": "FedAS"}) for metric in outcome.study.metrics}
    before, lost = shown["as trained(%)"], shown["lost by FIM (points)"]
    assert (
        before is not None and lost is not None and shown["top 5 % by FIM(%)"] == pytest.approx(before - lost)
    )
    assert all(ours.cases == 1 for ours, _ in outcome.claim_results)
    page = write_reproduction(outcome).read_text()
    drawn = page.partition("<h2>fim over the rounds</h2>")[2].partition("<h2>")[0]
    first = shown["t-FIM, first round"]
    assert (
        first is not None and "<svg" in drawn and "benign" in drawn
    )  # the median over the clients, here all benign
