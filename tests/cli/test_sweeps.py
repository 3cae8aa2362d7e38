"""`holdfast sweep` as a user meets it: the table, JSON, exit codes, refusals, and a real kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from holdfast.engine.simulator import Simulator
from holdfast.interactive.progress import Follow
from holdfast.report.page import render
from holdfast.report.read_runs import read_records
from tests.cli.commands import HERE, Answer, refused
from tests.cli.failing_method import FELL
from tests.experiment.kills import bits

CONFIG = """
[data]
clients = 4
partition = { name = "pathological", samples_per_client = 20 }
[model]
name = "mlp"
hidden = 8
[train]
rounds = 2
local_epochs = 1
dtype = "float64"
[engine]
plan = "vmap"
threads = 1
[sweep]
"method.name" = ["fedavg", "ditto"]
seed = [0, 1]
"""


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_disk: None) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "sweep.toml").write_text(CONFIG)
    return tmp_path / "sweep.toml"


@pytest.fixture
def holdfast(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def run(*args: Any) -> Answer:
        with pytest.raises(SystemExit) as left:
            main([str(a) for a in args])
        said = capsys.readouterr()
        return Answer(int(left.value.code or 0), said.out, said.err)

    return run


def test_the_same_command_again_says_the_same(
    holdfast: Callable[..., Answer], grid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = holdfast("sweep", grid, "--out", "s")
    assert (
        first.code == 0
        and first.out.count("finished") == 4
        and "over seeds" in first.out
        and "plan vmap" in first.err
    )
    monkeypatch.setattr(Simulator, "exchange", lambda *args: pytest.fail("trained again"))
    again = holdfast("sweep", grid, "--out", "s")
    assert again.out == first.out and again.err == "" == holdfast("run", grid, "--out", "s").err
    assert holdfast("resume", "s").out == first.out


def test_json(holdfast: Callable[..., Answer], grid: Path) -> None:
    shown = json.loads(holdfast("sweep", grid, "--out", "s", "--shard", "1/2", "--json").out)
    assert set(shown) == {"run_dir", "cells"} and shown["run_dir"] == "s"
    assert all(
        set(c) == {"label", "run_dir", "status", "round", "reason", "rounds", "final", "protocol"}
        for c in shown["cells"]
    )
    assert [(c["label"], c["status"]) for c in shown["cells"]] == [
        ("fedavg seed=0", "finished"),
        ("fedavg seed=1", "finished"),
        ("ditto seed=0", "other shard"),
        ("ditto seed=1", "other shard"),
    ]
    assert 0 <= shown["cells"][0]["final"]["accuracy"] <= 1 and shown["cells"][2]["final"] is None
    assert shown["cells"][0]["run_dir"] == "s/000-fedavg_seed=0" and shown["cells"][0]["reason"] is None
    assert "other shard: not begun" in holdfast("sweep", grid, "--out", "s", "--shard", "1/2").out


def test_a_failing_cell(holdfast: Callable[..., Answer], grid: Path) -> None:
    names = ("--set", 'sweep.method.name=["fedavg", "test-cli-falls"]', "--set", "sweep.seed=[0]")
    for command in (
        ("sweep", grid, *names),
        ("sweep", grid, *names, "--retry"),
        ("run", grid, *names),
        ("resume",),
    ):
        where = ("s",) if command[0] == "resume" else ("--out", "s")
        answer = holdfast(*command, *where)
        assert answer.code == 1 and "failed in round 1: ZeroDivisionError: the server fell" in answer.out, (
            command
        )
        assert "finished" in answer.out and "Traceback" not in answer.err and "--retry" in answer.err
        assert "s/001-test-cli-falls_seed=0/traceback.txt" in answer.err
    shown = holdfast("sweep", grid, *names, "--out", "s", "--json")
    reason = f"ZeroDivisionError: the server fell (failing_method.py, line {FELL})"
    assert shown.code == 1 and json.loads(shown.out)["cells"][1]["reason"] == reason
    assert holdfast("sweep", grid, *names, "--out", "s", "--shard", "1/2").code == 0, (
        "another shard's failure"
    )
    text = render(read_records(Path("s")))
    assert "1 of the runs failed and have no figures" in text
    assert f'<td class="status">failed in round 1: {reason}</td>' in text, (
        "a sentence wraps, a figure does not"
    )
    assert ".status {" in text
    assert f"| failed in round 1: {reason} |" in holdfast("report", "s", "--markdown").out


def test_a_diverging_cell_is_no_error_but_is_seen(holdfast: Callable[..., Answer], grid: Path) -> None:
    answer = holdfast("sweep", grid, "--out", "s", "--set", "sweep.train.lr=[0.1, 1e300]")
    assert answer.code == 0 and answer.out.count("diverged in round 1: ") == 4 and "2 diverged" in answer.out
    last = answer.err.strip().splitlines()[-1]
    assert answer.err.count("diverged in round 1") == 4 and last.startswith(
        "cells diverged: 4; the first is "
    )
    assert last.endswith("in round 1; lower train.lr (now 1e+300)")
    text = render(read_records(Path("s")))
    assert "4 of the runs diverged" in text and "2 diverged" in text
    cell = json.loads(holdfast("resume", "s", "--json").out)["cells"][1]
    assert cell["status"] == "diverged" and cell["final"]["diverged"] == 1 == cell["round"]


def test_a_page_without_the_plug_in_of_a_cell_that_failed(
    holdfast: Callable[..., Answer], grid: Path
) -> None:
    names = ("--set", 'sweep.method.name=["fedavg", "test-cli-falls"]', "--set", "sweep.seed=[0]")
    holdfast("sweep", grid, *names, "--out", "s")
    (folder,) = Path("s").glob("*test-cli-falls*")
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"test-cli-falls"', '"test-nowhere"'))
    assert "unknown: the method is not installed here" in render(read_records(Path("s")))


def test_a_page_of_a_part_of_a_sweep(holdfast: Callable[..., Answer], grid: Path) -> None:
    holdfast("sweep", grid, "--out", "s", "--shard", "1/4")
    assert "3 cells of the sweep have not begun" in render(read_records(Path("s")))


def test_refusals(holdfast: Callable[..., Answer], grid: Path) -> None:
    for shard in ("0/2", "3/2", "2", "a/b", "1/0", "-1/2", "1/2/3"):
        refused(
            holdfast("sweep", grid, "--out", "s", f"--shard={shard}"), f"--shard {shard}", "for example 2/4"
        )
    refused(holdfast("sweep", grid, "--shard", "1/2"), "--shard", "--out")
    refused(holdfast("sweep", "--out", "s"), "no [sweep] section", "holdfast run")
    refused(holdfast("sweep", grid, "--out", "s", "--set", "train.lr=-1"), "train.lr", "fedavg seed=0")
    refused(holdfast("sweep", grid, "--out", "s", "--set", "data.clients=5000"), "5000")
    assert not Path("s").exists()
    assert holdfast("sweep", grid, "--out", "s").code == 0
    refused(
        holdfast("sweep", grid, "--out", "s", "--set", "train.lr=0.5"),
        "holds another sweep",
        "train.lr is ",
        "here 0.5",
    )
    refused(holdfast("run", "--out", "s"), "already holds a run")


def test_an_empty_shard_says_so(holdfast: Callable[..., Answer], grid: Path) -> None:
    answer = holdfast("sweep", grid, "--out", "s", "--shard", "1/9")
    assert answer.code == 0 and "shard 1/9 is empty: the sweep has 4 cells" in answer.err
    assert answer.out.count("other shard: not begun") == 4


def test_a_sweep_of_one_cell_is_a_sweep(holdfast: Callable[..., Answer], grid: Path) -> None:
    one = ("--set", 'sweep.method.name=["fedavg"]', "--set", "sweep.seed=[0]")
    assert holdfast("run", grid, *one, "--out", "s").code == 0
    assert (
        Path("s/000-fedavg_seed=0/result.json").exists()
        and "fedavg seed=0" in holdfast("report", "s", "--markdown").out
    )


def test_interrupted(holdfast: Callable[..., Answer], grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Follow, experiment: Any) -> None:
        if experiment.run_context.round == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Follow, "moved", stop)
        answer = holdfast("sweep", grid, "--out", "s")
    assert answer.code == 130 and "`holdfast resume s` continues it" in answer.err
    assert holdfast("sweep", grid, "--out", "s").code == 0


def test_many_cells_have_one_bar(
    holdfast: Callable[..., Answer], grid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr.__class__, "isatty", lambda self: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    answer = holdfast(
        "sweep",
        grid,
        "--out",
        "s",
        "--set",
        "sweep.seed=[0, 1, 2, 3, 4, 5, 6]",
        "--set",
        "train.local_epochs=1",
    )
    assert "14 experiments" in answer.err and "28/28" in answer.err


@pytest.mark.slow
def test_killed_by_the_system(holdfast: Callable[..., Answer], grid: Path) -> None:
    """Two real processes, one shard each, are killed; the same commands go on."""
    arguments = ["sweep", str(grid), "--set", "train.rounds=20"]
    shards = [("--shard", f"{number}/2") for number in (1, 2)]
    command = [sys.executable, "-m", "holdfast.cli", *arguments, "--out", "cut"]
    running = [
        subprocess.Popen([*command, *shard], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=HERE)
        for shard in shards
    ]
    deadline = time.monotonic() + 300
    while len(list(Path("cut").glob("*/parts/000002.json"))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for process in running:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(list(Path("cut").glob("*/result.json"))) < 4
    for out in ("cut", "whole"):
        assert all(holdfast(*arguments, "--out", out, *shard).code == 0 for shard in shards)
    for folder in sorted(Path("whole").glob("[0-9]*")):
        assert bits(Path("cut") / folder.name) == bits(folder)
