"""FedCAP's studies: one table played, the measures of Fig. 3 by hand."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, cast

import pandas as pd

from holdfast.report.reproduction import write_reproduction
from holdfast.reproducing.cells import Wanted
from holdfast.reproducing.measures import measured
from holdfast.reproducing.outcome import reproduce
from holdfast.reproducing.study import read
from holdfast.results import Run


def test_table_3_at_the_smallest_scale(tmp_path: Path) -> None:
    engine = (("engine.plan", "vmap"), ("engine.threads", 1), ("engine.workers", 1))
    outcome = reproduce(read("fedcap/table-3"), Wanted(scale="smoke", changes=engine), tmp_path / "out")
    assert outcome.missing == 0 and len(outcome.played) == 7
    values = outcome.ours
    for attack in values.labels["attack"]:
        at = {"dataset": "CIFAR-10", "method": "FedCAP", "attack": attack}
        accuracy, missed = values.mean("TAcc(%)", at), values.mean("FNR(%)", at)
        assert accuracy is not None and 10 < accuracy <= 100
        assert missed is None if attack == "benign" else missed is not None and 0 <= missed <= 100
    printed = outcome.printed
    assert printed.mean("TAcc(%)", {"dataset": "CIFAR-10", "method": "FedCAP", "attack": "benign"}) == 85.6
    assert [finding.holds for _, finding in outcome.findings] == [True, True, True, True]  # in print
    assert all(finding.cases for finding, _ in outcome.findings)
    assert outcome.grid.substitutes == ["digits for all data"]


def test_fig_3_draws_lengths_of_both_kinds_of_client(tmp_path: Path) -> None:
    engine = (("engine.plan", "vmap"), ("engine.threads", 1), ("engine.workers", 1))
    outcome = reproduce(read("fedcap/fig-3"), Wanted(scale="smoke", changes=engine, only=("attack=benign,MR",)), tmp_path / "out")
    page = write_reproduction(outcome).read_text()
    assert "norms over the rounds" in page and "MR malicious" in page and "MR benign" in page and "benign benign" in page
    at = {"dataset": "CIFAR-10", "method": "FedAvg", "attack": "MR"}
    first, benign = outcome.ours.mean("malicious, first round", at), outcome.ours.mean("benign, last round with any", at)
    assert first is not None and benign is not None and first > 3 * benign  # ten times an honest one, and benign ones grow too
    assert outcome.ours.mean("malicious, first round", {**at, "attack": "benign"}) is None


def test_lengths_of_updates() -> None:
    rows = [(1, 0, False, 1.0), (1, 1, True, 2.0), (1, 2, True, 4.0), (2, 0, False, 5.0), (2, 1, True, 30.0)]
    rows += [(3, 1, True, float("inf")), (3, 2, True, 6.0)]
    run = types.SimpleNamespace(table=lambda name: pd.DataFrame(rows, columns=["round", "client", "malicious", "value"]))
    read_off: dict[str, Any] = {name: measured(f"norm/{name}")(cast(Run, run)) for name in
                                ("malicious/first", "malicious/last", "malicious/growth", "benign/last")}  # fmt: skip
    assert read_off == {"malicious/first": 3.0, "malicious/last": 6.0, "malicious/growth": 10.0, "benign/last": 5.0}
    nobody = types.SimpleNamespace(table=lambda name: pd.DataFrame(rows[:1], columns=["round", "client", "malicious", "value"]))
    assert measured("norm/malicious/growth")(cast(Run, nobody)) is None
