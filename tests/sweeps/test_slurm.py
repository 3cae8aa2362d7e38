"""A sweep on SLURM: the script, what is written, and, with submitit's local executor, elements that are
queued again or killed and submitted again, with the bits of one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.core.errors import ConfigError, RunError
from holdfast.sweeps.grid import configs
from holdfast.sweeps.runner import sweep
from holdfast.sweeps.slurm import SlurmSweep, slurm_sweep
from holdfast.sweeps.slurm_element import Element
from tests.cli.commands import HERE, Answer, refused
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
workers = 1
[sweep]
"method.name" = ["fedavg", "ditto"]
seed = [0, 1]
"""
SBATCH = """#!/bin/sh
cp "$1" "$(dirname "$0")/submitted.sh"
if [ -n "$REFUSES" ]; then echo "sbatch: error: invalid partition specified: $REFUSES" >&2; exit 1; fi
echo "Submitted batch job 4321"
"""


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "sweep.toml").write_text(CONFIG)
    return tmp_path / "sweep.toml"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs with the names of SLURM's, which only keep the script."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return programs


def flags(script: str) -> dict[str, str]:
    """The options of sbatch in a script."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


def on_cpus(text: str = "jobs=2 time=10", out: str = "s", **given: Any) -> SlurmSweep:
    return slurm_sweep(text, tomllib.loads(CONFIG), Path(out), **given)


def test_a_dry_run_prints_the_script_and_writes_nothing(cli: Callable[..., Answer], grid: Path) -> None:
    answer = cli(
        "sweep", grid, "--out", "s", "--slurm", "partition=gpu gpus=2 cpus=4 time=02:00:00", "--dry-run"
    )
    assert answer.code == 0 and not Path("s").exists()
    found = flags(answer.out)
    expected = {
        "array": "0-1%2",
        "cpus-per-task": "4",
        "gpus-per-node": "1",
        "job-name": "holdfast-s",
        "nodes": "1",
        "open-mode": "append",
        "partition": "gpu",
        "requeue": "",
        "signal": "USR2@90",
        "time": "120",
    }
    assert {name: found[name] for name in expected} == expected and "wckey" not in found
    assert Path(found["output"]) == Path("s/slurm/%A_%a_0_log.out").resolve()
    assert "--cpus-per-task 4" in answer.out and "-m submitit.core._submit" in answer.out
    config, out = Path("s/slurm/sweep.toml").resolve(), Path("s").resolve()
    for shard in ("1/2", "2/2"):
        assert f"holdfast.cli sweep {config} --out {out} --shard {shard}\n" in answer.out
    shown = json.loads(cli("sweep", grid, "--slurm", "time=5", "--dry-run", "--json").out)
    assert len(shown["commands"]) == 1 and "array" not in flags(shown["script"])


def test_elements_are_told_of_plug_ins_trackers_and_retry(cli: Callable[..., Answer], grid: Path) -> None:
    Path("mine.py").write_text("")
    words = ("--plugin", "mine.py", "--track", "tensorboard", "--retry", "--dry-run")
    answer = cli("sweep", grid, "--out", "s", "--slurm", "time=5", *words)
    told = f"--shard 1/1 --plugin {Path('mine.py').resolve()} --track tensorboard --retry\n"
    assert answer.code == 0 and told in answer.out


def test_what_an_element_imports_first_takes_no_time() -> None:
    """submitit's process reads it; PyTorch is for the process of Holdfast."""
    asked = "import sys, holdfast.sweeps.slurm_element; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", asked], check=True, env=HERE)


def test_more_elements_than_gpus_wait_for_each_other(grid: Path) -> None:
    found = flags(on_cpus("jobs=4 time=10").script())
    assert found["array"] == "0-3%4" and "gpus-per-node" not in found
    table = {**tomllib.loads(CONFIG), "engine": {"device": "cuda"}}
    found = flags(slurm_sweep("jobs=4 gpus=h100:2 time=1", table, Path("s")).script())
    assert found["array"] == "0-3%2" and found["gpus-per-node"] == "h100:1"
    assert found["signal"] == "USR2@30", "an element of a minute is told in time"


def test_the_submitted_script_is_the_one_that_a_dry_run_prints(
    cli: Callable[..., Answer], grid: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "b7-secret-of-the-user")
    asked = ("sweep", grid, "--out", "s", "--slurm", "gpus=2 time=60 account=lab setup='module load cuda'")
    printed = cli(*asked, "--dry-run").out
    answer = cli(*asked)
    assert answer.code == 0, answer.err
    script = (cluster / "submitted.sh").read_text()
    assert printed.startswith(script) and "module load cuda\n" in script and flags(script)["account"] == "lab"
    out = Path("s").resolve()
    for line in (
        "4321: 2 elements for 4 cells",
        f"holdfast report {out} --live",
        f"holdfast resume {out}",
        f"logs            {out / 'slurm'}",
    ):
        assert line in answer.out
    sent = tomllib.loads(Path("s/slurm/sweep.toml").read_text())
    assert sent["engine"]["device"] == "cuda" and sent["sweep"]["seed"] == [0, 1]
    assert sorted(file.name for file in Path("s/slurm").glob("*.pkl")) == [
        "4321_0_submitted.pkl",
        "4321_1_submitted.pkl",
    ]
    for file in [*Path("s").rglob("*"), cluster / "submitted.sh"]:
        assert file.is_dir() or b"b7-secret-of-the-user" not in file.read_bytes(), file


def test_what_sbatch_refuses_is_one_line(
    cli: Callable[..., Answer], grid: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSES", "gpuu")
    answer = cli("sweep", grid, "--out", "s", "--slurm", "partition=gpuu time=5 jobs=2")
    refused(answer, "slurm: the job was not submitted", "invalid partition specified: gpuu")
    monkeypatch.delenv("REFUSES")
    assert cli("sweep", grid, "--out", "s", "--slurm", "time=5 jobs=2").code == 0


def test_a_finished_sweep_is_not_submitted_but_shown(cli: Callable[..., Answer], grid: Path) -> None:
    first = cli("sweep", grid, "--out", "s")
    again = cli("sweep", grid, "--out", "s", "--slurm", "time=5 jobs=2")
    assert first.code == again.code == 0 and again.out == first.out


def test_refusals(cli: Callable[..., Answer], grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(text: str, *more: object) -> Answer:
        return cli("sweep", grid, "--out", "s", "--slurm", text, *more)

    refused(ask("partition=gpu"), "time is missing", "for example")
    refused(ask("time=5"), "no `srun`", "--dry-run")
    refused(ask("time=5", "--shard", "1/2"), "--shard 1/2", "leave it out")
    refused(ask("time=5 gpus=1", "--device", "cpu"), "the device is cpu", "leave out gpus")
    refused(ask("time=5", "--set", "train.lr=-1"), "train.lr")
    refused(cli("sweep", grid, "--dry-run"), "--dry-run goes with --slurm")
    refused(cli("sweep", "--slurm", "time=5"), "no [sweep] section")
    refused(cli("sweep", grid, "--out", "a%j", "--slurm", "time=5"), "a %", "--out")
    assert not Path("s").exists()
    monkeypatch.setitem(sys.modules, "submitit", None)
    refused(ask("time=5"), "submitit", "pip install 'holdfast[slurm]'")


def test_from_python_a_sweep_is_submitted(
    grid: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = holdfast.sweep(str(grid), out="s", slurm="jobs=2 time=5")
    assert [cell.status for cell in cells] == ["not begun"] * 4
    assert "4321: 2 elements for 4 cells" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="Python objects"):
        holdfast.sweep(str(grid), out="t", slurm="time=5", train={"loss": lambda scores, y: scores.sum()})
    with pytest.raises(ConfigError, match="leave out shard"):
        holdfast.sweep(str(grid), out="t", slurm="time=5", shard=(1, 2))
    assert not Path("t").exists()


def element(folder: Path, *words: str) -> Element:
    return Element([sys.executable, *words], str(folder), 1, 1, str(folder), pause=0.0)


def test_an_element_starts_its_command_again_after_a_signal_to_the_job(tmp_path: Path) -> None:
    """The first process is stopped as SLURM does it, the second one finishes."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, signal\n"
        "ran = pathlib.Path('ran')\n"
        "before = ran.exists()\n"
        "ran.write_text('x')\n"
        "if not before:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "pathlib.Path('finished').write_text('x')\n"
    )
    element(tmp_path, str(program))()
    assert (tmp_path / "finished").exists()


def test_an_element_whose_command_fails_says_so_and_does_not_repeat_it(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="ended with exit code 3; its log says why"):
        element(tmp_path, "-c", "import sys; open('ran', 'a').write('x'); sys.exit(3)")()
    assert (tmp_path / "ran").read_text() == "x"


def test_an_element_whose_cells_another_process_keeps_does_not_end_as_finished(grid: Path) -> None:
    asked = on_cpus()
    folder = asked.out
    folder.mkdir()
    (folder / "sweep.json").write_text(
        json.dumps({"cells": [{"label": "fedavg seed=0", "folder": "000-a", "config": {}}]})
    )
    with pytest.raises(RunError, match="shard 1/1 .* is not finished after"):
        element(folder, "-c", "")()


def child_of(pid: int) -> int:
    """The first child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def time_out(controller: int) -> None:
    """Tell the process of submitit what SLURM tells it before the time of a job ends."""
    os.kill(child_of(controller), signal.SIGUSR2)


def kill(controller: int) -> None:
    """Kill an element with all its processes."""
    runs = child_of(controller)
    for process in (controller, child_of(runs), runs):
        os.kill(process, signal.SIGKILL)


def when_there(file: Path, act: Callable[[], None]) -> threading.Thread:
    """Act as soon as a file is there."""

    def watch() -> None:
        deadline = time.monotonic() + 200
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_killed_element_is_submitted_again_and_a_timed_out_one_by_itself(
    cli: Callable[..., Answer], grid: Path
) -> None:
    """Two elements of two cells. The first is told that its time ends, as SLURM does, and is queued again;
    the second is killed with all its processes, and what is left is submitted again."""
    table = tomllib.loads(CONFIG)
    table["train"]["rounds"] = 60
    asked = slurm_sweep("jobs=2 time=60", table, Path("cut"), cluster="local")
    asked.submit()
    first, second = asked.jobs
    watches = (
        when_there(asked.out / "000-fedavg_seed=0/parts/000002.json", lambda: time_out(first._process.pid)),
        when_there(asked.out / "002-ditto_seed=0/parts/000002.json", lambda: kill(second._process.pid)),
    )
    for watch in watches:
        watch.join()
    first.result()
    assert "Requeued job" in first.stdout() and asked.left() == 2
    again = slurm_sweep("jobs=1 time=60", table, Path("cut"), cluster="local")
    again.submit()
    for job in again.jobs:
        job.result()
    assert asked.left() == 0
    for shard in (1, 2):
        sweep(configs(table), Path("whole"), shard=(shard, 2))
    for folder in sorted(Path("whole").glob("[0-9]*")):
        assert bits(asked.out / folder.name) == bits(folder)
    shown = cli("sweep", grid, "--set", "train.rounds=60", "--out", "cut")
    assert shown.code == 0 and shown.out.count("finished") == 4, "the same command prints the table"
