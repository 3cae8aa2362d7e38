"""A run in Python: how it shows itself, its figure, page and files."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.core.errors import ConfigError
from holdfast.evaluation.glossary import explain
from holdfast.interactive.sweep import Sweep
from tests.experiment.sessions import TINY


def test_it_tells_what_it_is(sweep: Sweep) -> None:
    run = sweep[2].run
    accuracy = f"{run.final['accuracy']:.4f}"
    assert (
        repr(run)
        == f"Run(ditto on digits, 4 clients, round 2 of 2, finished, accuracy {accuracy}: {run.path})"
    )
    assert run.status == "finished" and run.accuracy == run.final["accuracy"]
    shown = run._repr_html_()
    assert '<td style="text-align:left">ditto</td>' in shown and accuracy in shown


def test_all_columns_are_documented(tmp_path: Path) -> None:
    """Of a run that has as many of them as possible."""
    run = holdfast.run(
        TINY,
        out=tmp_path / "run",
        method="fedcap",
        attack={"name": "ipm", "fraction": 0.34},
        detectors=["norm"],
        data={"clients": 5, "held_out": 1, "split": {"train": 0.5, "validation": 0.2, "test": 0.3}},
        evaluate={"metrics": ["auc", "macro_f1"]},
    )
    assert [name for name, text in run.columns.items() if not text] == []
    assert [name for name in run.final if not explain(name)] == []
    assert run.columns["accuracy/late/personal"].endswith("of the personal model")


def test_its_figure(sweep: Sweep) -> None:
    pytest.importorskip("matplotlib")
    run = sweep[2].run
    (axes,) = run.plot(["accuracy/global", "accuracy/personal"]).subfigs[0].axes
    drawn = {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()}
    assert drawn == {name: run.metrics[name].tolist() for name in ("accuracy/global", "accuracy/personal")}
    with pytest.raises(ConfigError, match="unknown metric 'los'; did you mean 'loss'"):
        run.plot("los")


def test_a_figure_without_matplotlib_names_the_extra(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[figures\]'"):
        sweep[0].run.plot()


def test_its_page(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    page = sweep[0].run.report(open=True)
    assert page.name == "report.html" and opened == [page.resolve().as_uri()]


def test_what_it_exports_can_be_read_and_run_again(sweep: Sweep, tmp_path: Path) -> None:
    run = sweep[2].run
    folder = run.export(tmp_path / "out", clients=[0, 3])
    assert {file.name for file in (folder / "models").iterdir()} == {
        "global.safetensors",
        "client-0.safetensors",
        "client-3.safetensors",
    }
    module = run.model(client=3)
    saved = load_file(folder / "models" / "client-3.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
    assert pd.read_parquet(folder / "metrics.parquet").equals(run.metrics)
    assert pd.read_csv(folder / "metrics.csv")["accuracy"].tolist() == run.metrics["accuracy"].tolist()
    assert pd.read_csv(folder / "clients.csv")["client"].tolist() == [0, 1, 2, 3]
    config = tomllib.loads((folder / "config.toml").read_text())
    again = holdfast.run(config, out=tmp_path / "again")
    assert again.final["accuracy"] == run.final["accuracy"]
    with pytest.raises(ConfigError, match="not an empty folder"):
        run.export(folder)
    assert len(list((sweep[0].run.export(tmp_path / "g") / "models").iterdir())) == 1, "fedavg has one model"
