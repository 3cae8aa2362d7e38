"""The sentence at the top, and what is said of how it was measured, claim no more than the runs give."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from holdfast.report.page import render
from holdfast.report.protocol import protocol
from holdfast.report.read_runs import by_setting, read_records
from holdfast.report.sections import facts
from holdfast.report.settings_by_attack import SettingsByAttack
from holdfast.report.verdict import verdict
from tests.report.conftest import sweep, text_of


def unfinished(run: Path) -> None:
    """As if it had been stopped after its second round."""
    (run / "result.json").unlink()
    head = json.loads((run / "head.json").read_text())
    (run / "head.json").write_text(json.dumps({**head, "round": 2}))


def test_a_run_under_attack_without_its_honest_twin(tmp_path: Path) -> None:
    said = verdict(
        by_setting(read_records(sweep(tmp_path / "s", attack={"name": "sign-flip", "fraction": 0.25})))
    )[1]
    assert "of a benign client's test samples correctly under attack." in said


def test_a_run_that_goes_on_is_no_result_yet(single: Path, tmp_path: Path) -> None:
    shutil.copytree(single, tmp_path / "run")
    unfinished(next((tmp_path / "run").rglob("result.json")).parent)
    text = render(read_records(tmp_path / "run"))
    assert (
        "It has finished 2 of 3 rounds.</p>" in text
        and "the headline is round 2 of 3, the last so far" in text
    )
    assert "It has finished" not in render(
        read_records(single)
    ) and "the headline is the last round (3)" in render(read_records(single))


def test_runs_that_diverged_failed_or_go_on_are_in_the_sentence(grid: Path, tmp_path: Path) -> None:
    shutil.copytree(grid, tmp_path / "s")
    first, second, third, *_ = sorted(file.parent for file in (tmp_path / "s").glob("*/result.json"))
    result = json.loads((first / "result.json").read_text())
    (first / "result.json").write_text(json.dumps({**result, "final": {**result["final"], "diverged": 2}}))
    unfinished(second)
    (third / "result.json").unlink()
    (third / "failure.json").write_text(json.dumps({"round": 2, "reason": "no memory"}))
    assert verdict(by_setting(read_records(tmp_path / "s")))[1].endswith(
        " Of 6 runs 1 is not finished, 1 diverged, 1 failed."
    )
    shutil.rmtree(third)
    assert ("", "1 to 2 seeds each") in facts(by_setting(read_records(tmp_path / "s")))


def test_a_last_step_after_the_rounds_is_not_called_a_round(tmp_path: Path) -> None:
    lines = by_setting(read_records(sweep(tmp_path / "s", method={"name": "c-pfl"})))
    assert "last step, which follows round 3" in text_of(protocol(lines, SettingsByAttack(lines)))


def test_only_those_on_the_same_data_are_compared(tmp_path: Path) -> None:
    axes = {"data.partition.beta": [0.1, 5.0]}
    name, said = verdict(
        by_setting(read_records(sweep(tmp_path / "s", train={"rounds": 1, "local_epochs": 1}, sweep=axes)))
    )
    assert name.startswith("beta=") and "points more" not in said
