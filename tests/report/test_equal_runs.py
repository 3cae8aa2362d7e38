"""Runs of a sweep that differ in a setting and end bit-equal are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.core.toml import to_toml
from holdfast.report.equal_runs import without_effect
from holdfast.report.page import render
from holdfast.report.read_runs import read_records
from tests.report.conftest import TINY, sweep


def test_a_setting_that_changes_nothing_is_named_once_with_its_runs(tmp_path: Path) -> None:
    """With fedas on a head that is private, `rho` is not read; `align_lr` is."""
    fedas = {"method": {"name": "fedas"}, "train": {"rounds": 2, "local_epochs": 1}}
    axes = {"method.rho": [0.25, 0.75], "method.align_lr": [0.01, 0.1], "seed": [0, 1]}
    records = read_records(sweep(tmp_path / "s", **fedas, sweep=axes))
    (said,) = without_effect(records)
    first = f"{records[0].label}, {records[4].label}"
    assert said.startswith(
        f"method.rho made no difference: {first} (and 3 more such groups) differ in it, but all their figures"
    )
    page = render(records)
    assert "method.rho made no difference" in page and ", exactly as " in page


def test_a_setting_with_an_effect_is_not(grid: Path, duel: Path) -> None:
    assert without_effect(read_records(grid)) == [] == without_effect(read_records(duel))
    assert "made no difference" not in render(read_records(grid))


def test_what_is_measured_beside_may_change_nothing(tmp_path: Path) -> None:
    assert (
        without_effect(
            read_records(sweep(tmp_path / "s", sweep={"evaluate.unselected": ["keep_own", "deliver"]}))
        )
        == []
    )


def test_the_command_line_says_so_below_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = {
        **TINY,
        "method": {"name": "fedas"},
        "train": {"rounds": 1, "local_epochs": 1},
        "sweep": {"method.rho": [0.25, 0.75]},
    }
    (tmp_path / "c.toml").write_text(to_toml(table))
    with pytest.raises(SystemExit) as end:
        main(["sweep", str(tmp_path / "c.toml"), "--out", str(tmp_path / "out")])
    assert end.value.code == 0
    assert "method.rho made no difference" in " ".join(capsys.readouterr().err.split())
