"""The demonstration, cut short, and whole."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.demo import runner as demo
from holdfast.experiment.config_tables import read_config


def test_the_demo_writes_a_page_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        demo,
        "read_config",
        lambda file: read_config(file, ["train.rounds=2", "sweep.seed=[0, 1]", "engine.plan=vmap"]),
    )
    with pytest.raises(SystemExit) as left:
        main(["demo", "--out", str(tmp_path / "demo")])
    said = capsys.readouterr()
    assert not left.value.code
    page = tmp_path / "demo" / "report.html"
    assert page.is_file() and str(page) in said.out
    assert all(name in said.out for name in ("local", "fedavg", "ditto", "fedcap", "worst 10 %"))
    assert "plan vmap" in said.err and "32/32 rounds" in said.err


def test_the_demo_is_one_sweep_of_the_methods_it_lists() -> None:
    cells = demo.cells()
    settings = [
        f"{method} {attack}"
        for method in ("local", "fedavg", "ditto", "fedcap")
        for attack in ("none", "ipm")
    ]
    assert [label for label, _ in cells] == [
        f"{setting} seed={seed}" for setting in settings for seed in (0, 1, 2)
    ]
    assert {config.data.name for _, config in cells} == {"digits"}
    assert (
        f"{cells[0][1].data.clients} clients" in demo.INTRODUCTION
        and f"{len(cells)} runs" in demo.INTRODUCTION
    )


@pytest.mark.slow
def test_fedcap_withstands_the_attack_in_the_demo(tmp_path: Path) -> None:
    from holdfast.experiment.runner import RunCallbacks
    from holdfast.report.read_runs import by_setting, read_records

    began = time.monotonic()
    demo.run_demo(tmp_path / "demo", RunCallbacks())
    assert time.monotonic() - began < 60
    lines = {line.label: line for line in by_setting(read_records(tmp_path / "demo"))}
    accuracy = {label: line.mean("accuracy") or 0.0 for label, line in lines.items()}
    assert (
        accuracy["ditto none"] > accuracy["local none"]
        and accuracy["ditto none"] > accuracy["fedavg none"] > 0.8
    )
    assert accuracy["fedavg ipm"] < 0.3 and accuracy["ditto ipm"] < 0.8 and accuracy["fedcap ipm"] > 0.9
    assert (
        lines["fedcap ipm"].mean("detection/dacc") == 1.0 and lines["fedcap ipm"].mean("detection/fpr") == 0.0
    )
