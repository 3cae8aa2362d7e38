"""`holdfast tune`: chosen by validation data and by nothing else, reported on other seeds, stopped and
continued."""

from __future__ import annotations

import csv
import json
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.cli import main
from holdfast.core.errors import ConfigError, RunError
from holdfast.core.reading import read_json
from holdfast.engine.simulator import Simulator
from holdfast.experiment.manifest import run_folders
from holdfast.results.run import Run
from holdfast.storage.status import RunStatus
from holdfast.sweeps.folder import read_sweep
from holdfast.sweeps.grid import configs
from holdfast.tuning.space import Candidate
from holdfast.tuning.tune import Tuning, _best
from tests.cli.commands import Answer
from tests.experiment.kills import bits

TABLE: dict[str, Any] = {
    "data": {
        "clients": 4,
        "split": {"train": 0.5, "validation": 0.25, "test": 0.25},
        "partition": {"name": "pathological", "samples_per_client": 24},
    },
    "model": {"name": "mlp", "hidden": 8},
    "train": {"rounds": 2, "local_epochs": 1, "dtype": "float64"},
    "attack": {"fraction": 0.25},
    "engine": {"plan": "vmap", "threads": 1},
    "tune": {"train.lr": [0.01, 0.3], "ditto": {"lam": [0.1, 1.0, 3.0]}},
    "sweep": {"method.name": ["fedavg", "ditto"], "attack.name": ["none", "ipm"], "seed": [0, 1]},
}

CONFIG = """
[data]
clients = 4
split = { train = 0.5, validation = 0.25, test = 0.25 }
partition = { name = "pathological", samples_per_client = 24 }
[model]
name = "mlp"
hidden = 8
[train]
rounds = 1
local_epochs = 1
[engine]
plan = "vmap"
threads = 1
[tune]
"train.lr" = [0.01, 0.3]
[sweep]
"method.name" = ["fedavg", "ditto"]
seed = [0, 1]
"""


def all_bits(path: Path) -> dict[str, Any]:
    return {folder.name: bits(folder) for folder in run_folders(path)}


def trial_status(
    accuracy: float | None, loss: float = 1.0, test: float = 0.0, status: str = "finished"
) -> RunStatus:
    final = {
        "validation/accuracy": accuracy,
        "validation/loss": loss,
        "accuracy": test,
        "accuracy/best": test,
    }
    return RunStatus("it", Path("it"), status, 3, "why", None if status == "failed" else {"final": final})


def choose(*statuses: RunStatus) -> int:
    return _best(Candidate("ditto", {}, {}, {}, ({},) * len(statuses)), statuses)


def test_only_validation_data_decides_the_choice() -> None:
    assert choose(trial_status(0.5, test=0.9), trial_status(0.6, test=0.1), trial_status(0.4, test=1.0)) == 1
    assert (
        choose(trial_status(0.5, 2.0), trial_status(0.5, 1.0), trial_status(0.5, 1.0)) == 1
    )  # of equals the smaller loss, then the first
    assert (
        choose(trial_status(None, status="failed"), trial_status(0.9, status="diverged"), trial_status(0.1))
        == 2
    )
    assert choose(trial_status(None, status="failed"), trial_status(0.2, status="diverged")) == 1
    with pytest.raises(RunError, match="all trials of 'ditto' failed: 'it' failed in round 3: why"):
        choose(trial_status(None, status="failed"), trial_status(None, status="failed"))
    with pytest.raises(RunError, match="no benign client of 'ditto' has validation data"):
        choose(trial_status(None))


def test_a_comparison_of_two_methods(
    tmp_path: Path, quick_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = holdfast.tune(TABLE, budget=4, out=tmp_path / "fair")
    # equally many trials, on a seed of their own, without an attack
    trials = read_sweep(tmp_path / "fair" / "trials")
    assert [label.split()[0] for label, _ in trials] == ["fedavg"] * 2 + ["ditto"] * 4
    assert {(config.seed, config.attack) for _, config in trials} == {(1000, None)}
    assert [choice.trials for choice in tuned.choices] == ["all 2", "4 of 6"]
    # by the validation data of the trials
    rows = list(csv.DictReader((tmp_path / "fair" / "trials.csv").open()))
    for choice in tuned.choices:
        mine = [row for row in rows if row["label"] == choice.candidate.label]
        finals = [Run(tmp_path / "fair" / row["folder"]).final for row in mine]
        assert [float(row["validation/accuracy"]) for row in mine] == [
            final["validation/accuracy"] for final in finals
        ]
        assert choice.validation == max(final["validation/accuracy"] for final in finals)
        chosen = [row for row in mine if row["chosen"] == "1"]
        assert len(chosen) == 1 and float(chosen[0]["train.lr"]) == choice.settings["train.lr"]
    # the report: what was chosen, under all attacks and seeds, which tuned.toml says too
    report = read_sweep(tmp_path / "fair" / "report")
    assert len(report) == 8 and {config.seed for _, config in report} == {0, 1}
    again = configs(tomllib.loads((tmp_path / "fair" / "tuned.toml").read_text()))
    assert [(label, config.plain()) for label, config in again] == [
        (label, config.plain()) for label, config in report
    ]
    best = {choice.candidate.label: choice.settings for choice in tuned.choices}
    for label, config in report:
        assert config.train.lr == best[label.split()[0]]["train.lr"] and (config.attack is None) == (
            "none" in label
        )
    # figures of the table are of the report's test data
    by_label = {line.label: line for line, _ in tuned.lines()}
    assert list(by_label) == ["fedavg none", "fedavg ipm", "ditto none", "ditto ipm"]
    values = [
        run_status.result["final"]["accuracy"]
        for run_status in tuned.statuses
        if run_status.label.startswith("ditto ipm")
    ]  # type: ignore[index]
    assert by_label["ditto ipm"].mean("accuracy") == pytest.approx(sum(values) / 2) and len(values) == 2
    assert "2 of 2 lines chose the lowest or highest" in str(tuned)  # there are only two
    assert (
        "4 trials for every line" in str(tuned)
        and "without an attack" in str(tuned)
        and "seeds 0, 1" in str(tuned)
    )
    # again: nothing runs
    before = all_bits(tmp_path / "fair" / "report")
    monkeypatch.setattr(Simulator, "exchange", lambda *_: pytest.fail("ran again"))
    assert str(holdfast.tune(TABLE, budget=4, out=tmp_path / "fair")) == str(tuned)
    assert all_bits(tmp_path / "fair" / "report") == before
    with pytest.raises(ConfigError, match="holds another sweep"):
        holdfast.tune(TABLE, budget=3, out=tmp_path / "fair")


@pytest.mark.parametrize("stage", ["trials", "report"])
def test_a_stopped_comparison_continues(
    tmp_path: Path, quick_disk: None, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    whole = holdfast.tune(TABLE, budget=2, out=tmp_path / "whole")
    exchange = Simulator.exchange
    calls = 0

    def stop(self: Simulator, calls_: Any) -> Any:
        nonlocal calls
        calls += (tmp_path / "cut" / stage / "groups").exists()
        if calls == 4:
            raise KeyboardInterrupt
        return exchange(self, calls_)

    monkeypatch.setattr(Simulator, "exchange", stop)
    with pytest.raises(KeyboardInterrupt):
        holdfast.tune(TABLE, budget=2, out=tmp_path / "cut")
    assert (tmp_path / "cut" / "trials.csv").exists() == (stage == "report")
    monkeypatch.setattr(Simulator, "exchange", exchange)
    assert str(holdfast.tune(TABLE, budget=2, out=tmp_path / "cut")) == str(whole)
    for part in ("trials", "report"):
        assert all_bits(tmp_path / "cut" / part) == all_bits(tmp_path / "whole" / part)


def test_tuning_under_each_attack(tmp_path: Path, quick_disk: None) -> None:
    table = TABLE | {"sweep": {"method.name": ["fedavg"], "attack.name": ["none", "ipm"], "seed": [0]}}
    tuned = holdfast.tune(table, budget=2, out=tmp_path / "fair", under_attack=True)
    assert [choice.candidate.label for choice in tuned.choices] == ["fedavg none", "fedavg ipm"]
    assert [config.attack is None for _, config in read_sweep(tmp_path / "fair" / "trials")] == [
        True,
        True,
        False,
        False,
    ]
    assert "under each attack" in tuned.words()


def test_tuning_one_experiment(tmp_path: Path, quick_disk: None) -> None:
    table = {name: given for name, given in TABLE.items() if name not in ("sweep", "attack")} | {
        "method": {"name": "ditto", "lam": 5.0}
    }
    tuned = Tuning(table, 1, tmp_path / "fair")
    (choice,) = tuned.try_all()
    assert (
        choice.candidate.label == "ditto"
        and choice.settings["method.lam"] in (0.1, 1.0, 3.0)
        and choice.trials == "1 of 6"
    )
    assert tuned.search.seeds == [0, 1, 2]


def test_tuning_a_config_with_python_objects(tmp_path: Path, quick_disk: None) -> None:
    """They are tuned like all else, but no file can name them."""
    model = holdfast.Model(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), head="1")
    table = TABLE | {"model": model, "attack": None, "sweep": {"method.name": ["fedavg"], "seed": [0]}}
    tuned = holdfast.tune(table, budget=2, out=tmp_path / "fair")
    assert tuned.choices[0].trials == "all 2" and (tmp_path / "fair" / "trials.csv").exists()
    assert not (tmp_path / "fair" / "tuned.toml").exists()
    with pytest.raises(ConfigError, match="holds a run or a sweep already"):
        holdfast.tune(TABLE, budget=2, out=tmp_path / "fair" / "report")


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_disk: None, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "sweep.toml").write_text(CONFIG)

    def run(*args: Any) -> Answer:
        with pytest.raises(SystemExit) as left:
            main([str(a) for a in args])
        said = capsys.readouterr()
        return Answer(int(left.value.code or 0), said.out, said.err)

    return run


def test_the_tune_command(cli: Callable[..., Answer], tmp_path: Path) -> None:
    first = cli("tune", "sweep.toml", "--budget", 2, "--out", "fair")
    assert (
        first.code == 0 and "2 of 8" in first.out and "all 2" in first.out and "fair/tuned.toml" in first.out
    )
    trials, _, report = first.err.partition("the report")
    assert "validation/accuracy 0." in trials and "  accuracy" not in trials and "  accuracy 0." in report
    answer = cli("tune", "sweep.toml", "--budget", 2, "--out", "fair", "--json")
    content = json.loads(answer.out)
    assert [(line["label"], line["trials"], line["possible"]) for line in content["tuned"]] == [
        ("fedavg", 2, 2),
        ("ditto", 2, 8),
    ]
    assert content["seed"] == 1000 and content["seeds"] == [0, 1] and content["budget"] == 2
    shown = content["report"][1]
    finals = [cell["final"]["accuracy"] for cell in content["cells"] if cell["label"].startswith("ditto")]
    assert shown["accuracy"] == pytest.approx(sum(finals) / 2) and shown["seeds"] == 2
    again = cli("sweep", "fair/tuned.toml", "--out", "again")
    assert again.code == 0
    one, two = (
        read_json(tmp_path / folder / "000-fedavg_seed=0" / "result.json")
        for folder in ("fair/report", "again")
    )
    assert one is not None and two is not None and one["final"]["accuracy"] == two["final"]["accuracy"]


PLUGIN = """
from holdfast.core.registry import register
from holdfast.methods.fedavg import FedAvg

@register("method", "my-own")
class MyOwn(FedAvg):
    "As fedavg."
"""


def test_the_commands_that_tune_prints_work(cli: Callable[..., Answer], tmp_path: Path) -> None:
    """Also with a plug-in, and where the folder's name has a space."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "sweep.toml").write_text(CONFIG.replace('"ditto"', '"my-own"'))
    answer = cli(
        "tune", "sweep.toml", "--budget", 2, "--out", "the fair one", "--plugin", "mine.py", "--explain"
    )
    assert answer.code == 0 and "settings of the trial with the best validation accuracy" in answer.out
    hints = [shlex.split(line)[1:] for line in answer.out.splitlines() if "  holdfast " in line]
    assert [hint[1] for hint in hints] == ["sweep", "report"] and all("--plugin" in hint for hint in hints)
    for hint in hints:
        assert cli(*hint[1:]).code == 0
    page = (tmp_path / "the fair one" / "report.html").read_text()
    assert "How settings were chosen" in page and "All trials (4)" in page
    again = cli("resume", "the fair one")
    assert again.code == 2 and "`holdfast tune` command that began it" in again.err
    assert cli("compare", "the fair one", "--against", "fedavg").code == 0
    assert set(holdfast.load("the fair one")["method"]) == {"fedavg", "my-own"}


def test_the_tune_command_refuses_wrong_input(cli: Callable[..., Answer]) -> None:
    said = cli(
        "tune",
        "sweep.toml",
        "--budget",
        2,
        "--set",
        "data.split.validation=0",
        "--set",
        "data.split.test=0.5",
    )
    assert said.code == 2 and said.err.count("\n") == 1 and "data.split = {" in said.err
    assert "--budget" in cli("tune", "sweep.toml").err
    assert "Examples" in cli("tune", "--help").out
    assert "`holdfast tune` tries lam = 0.01, 0.1, 1.0, 2.0" in cli("show", "ditto").out
    assert cli("run", "sweep.toml", "--out", "plain").code == 0  # [tune] is for tune alone
