from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli import main, plan
from holdfast.evaluation.glossary import explain
from holdfast.report.column_help import OTHERS, explained
from holdfast.report.compare import Comparison, read_lines
from holdfast.report.compare_tables import parts
from holdfast.report.read_runs import by_setting, read_records
from holdfast.report.table import ALWAYS, COSTS, ON_REQUEST, PRIVATE, UNDER_ATTACK, WITH_PEERS, tabulate

COLUMNS = (*ALWAYS, *ON_REQUEST.values(), *UNDER_ATTACK, *WITH_PEERS, *PRIVATE, *COSTS)


def test_every_column_of_every_table_is_explained(duel: Path, grid: Path) -> None:
    known = {column.title for column in COLUMNS} | set(OTHERS)
    assert all(column.own_help or explain(column.metrics[0]) for column in COLUMNS)
    comparison = Comparison(read_lines([duel]))
    titles = [title for part in parts(comparison) if not part.words for title in part.table.titles]
    for folder in (duel, grid):
        records = read_records(folder)
        titles += tabulate(by_setting(records), ["finished"] * len(by_setting(records))).titles
        assert all(explain(name) for record in records for name in record.final)
    assert set(titles) - {""} <= known and set(plan._TITLES) <= known
    told = dict(explained([tabulate(by_setting(read_records(duel)))]))
    assert told["±"] == "standard deviation over seeds" and "bold" in told


def test_the_terminal_explains_on_demand(duel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as left:
            main([*args])
        return left.value.code, *capsys.readouterr()

    code, out, _ = run("compare", str(duel), "--explain")
    assert code == 0 and "share of clients rightly banned" in out and "p of the paired t-test" not in out
    code, out, _ = run("report", str(duel), "--markdown", "--explain")
    assert code == 0 and "* **worst 10 %**: mean over the tenth of the clients" in out
    code, out, _ = run("resume", str(duel), "--explain")
    assert code == 0 and "how far the run is" in out
    code, _, err = run("compare", str(duel), "--explain", "--json")
    assert code == 2 and "--explain explains the table" in err
    code, _, err = run("report", str(duel), "--explain")
    assert code == 2 and "--markdown" in err
