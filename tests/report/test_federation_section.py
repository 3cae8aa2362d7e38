"""What a page says of a federation's ledger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.deploy.ledger import Ledger
from holdfast.report.federation_section import federated
from holdfast.report.page import render
from holdfast.report.read_runs import read_records
from holdfast.results.run import Run
from tests.report.conftest import text_of


def test_the_ledger_on_the_page(simulate: Callable[..., Run]) -> None:
    run = simulate(train={"rounds": 1})
    records = read_records(run.path)
    assert federated(records) is None
    ledger, label = Ledger(run.path.parent / "ledger.jsonl"), run.manifest["label"]
    for client in range(4):
        ledger.append("enrol", client, key=f"ssh-key-{client}")
    ledger.append("round", round=1, run="another", took_part=[0, 1, 2, 3])
    ledger.append("start", round=0, run=label)
    ledger.append("strike", 2, 1, reason="<b>update</b> is not finite", step=0)
    ledger.append("missing", None, 1, clients={"3": "not connected"})
    ledger.append("round", round=1, run=label, took_part=[0, 1, 2])
    ledger.append("ban", 1, 2, reason="norm 12", by="method")
    ledger.append("round", round=2, run=label, took_part=[0, 2, 3])
    page = render(records)
    for row in (
        '0</th><td><span role="img" aria-label="2 here"',
        "1 here, 1 banned",
        "1 refused, 1 here",
        "1 missing, 1 here",
    ):
        assert row in page
    assert "in round 2: norm 12 (by method)" in page and ledger.head in page
    assert "&lt;b&gt;update" in page and "<b>update" not in page and "ssh-key" not in page


def test_a_damaged_ledger_is_told(simulate: Callable[..., Run]) -> None:
    run = simulate(train={"rounds": 1})
    Path(run.path.parent / "ledger.jsonl").write_text("{}\n")
    assert "is damaged: line 1 is not an entry" in text_of(federated(read_records(run.path)))
