"""`--devices` of `holdfast run` and `holdfast resume`: processes of this machine that run one experiment
together."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from holdfast.cli import rank_processes
from holdfast.cli.rank_processes import options_again, run_on

CONFIG = """
[data]
clients = 7
[model]
name = "mlp"
hidden = 6
[method]
name = "ditto"
[train]
rounds = 16
local_epochs = 1
[engine]
plan = "loop"
threads = 1
"""


def test_a_command_is_given_again_with_its_options() -> None:
    app, seen = typer.Typer(), []

    @app.command()
    def run(
        context: typer.Context,
        config: str,
        change: Annotated[list[str], typer.Option("--set")],
        out: Annotated[str | None, typer.Option("--out")] = None,
        devices: Annotated[str | None, typer.Option("--devices")] = None,
        as_json: Annotated[bool, typer.Option("--json")] = False,
        rounds: Annotated[int, typer.Option("--rounds")] = 3,
    ) -> None:
        seen.append(options_again(context, devices=None, out="runs/x"))

    words = ["a b.toml", "--set", "x=1", "--set", "y=2", "--devices", "all", "--json"]
    typer.main.get_command(app)(words, prog_name="run", standalone_mode=False)
    assert seen == [["run", "a b.toml", "--set", "x=1", "--set", "y=2", "--out", "runs/x", "--json"]]


def scripted(monkeypatch: pytest.MonkeyPatch, *scripts: str) -> None:
    """Processes that run these scripts in place of holdfast."""

    def start(rank: int, devices: Any, words: Any, meeting: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", scripts[rank]])

    monkeypatch.setattr(rank_processes, "_start", start)


def test_a_process_that_is_killed_is_named_and_the_others_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_processes, "_SECONDS", 0.3)
    (tmp_path / "head.json").write_text("{}")
    scripted(monkeypatch, "import time; time.sleep(60)", "import os; os.kill(os.getpid(), 9)")
    began = time.monotonic()
    assert run_on(["cpu", "cpu"], ["run"], tmp_path) == 1
    assert time.monotonic() - began < 20
    said = capsys.readouterr().err
    assert "rank 1 (cpu) was ended by SIGKILL; the others were stopped" in said
    assert f"`holdfast resume {tmp_path} --devices cpu,cpu` goes on" in said


@pytest.mark.parametrize("code", [0, 2, 3])
def test_the_first_process_says_how_it_ended(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, f"raise SystemExit({code})", "raise SystemExit(0)")
    assert run_on(["cpu", "cpu"], ["run"], tmp_path) == code


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--devices", "tpu"], "'tpu' is not a device"),
        (["--devices", "cpu,cpu", "--device", "cpu"], "leave one of them out"),
    ],
)
def test_a_wrong_list_of_devices_is_one_line(cli: Any, words: list[str], expected: str) -> None:
    answer = cli("run", *words)
    assert answer.code == 2 and expected in answer.err
    assert len(answer.err.strip().splitlines()) == 1


def state_of(folder: Path) -> bytes:
    head = json.loads((folder / "head.json").read_text())
    return (folder / head["state"]).read_bytes()


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "holdfast", *map(str, words)]


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def listening(pids: list[int]) -> set[str]:
    """The addresses at which these processes listen."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address = words[1].partition(":")[0]
                ipv4 = len(address) == 8
                found.add(socket.inet_ntoa(bytes.fromhex(address)[::-1]) if ipv4 else address)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_rank_ends_the_run_and_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    config = tmp_path / "big.toml"
    config.write_text(CONFIG)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = {
        **env,
        "HOLDFAST_RANKS": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(command("run", config, "--out", whole), env=alone, check=True, capture_output=True)

    run = subprocess.Popen(
        command("run", config, "--out", broken, "--devices", "cpu,cpu,cpu"),
        env=env,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    until = time.monotonic() + 120
    while not (broken / "parts" / "000002.json").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert listening(children_of(run.pid)) == {"127.0.0.1"}
    os.kill(children_of(run.pid)[1], signal.SIGKILL)
    said = run.communicate(timeout=120)[1]
    assert run.returncode == 1
    assert "rank 1 (cpu) was ended by SIGKILL" in said
    assert re.search("error: (rank 1|another rank) has ended", said)  # by who of them notices it first
    assert "Traceback" not in said
    assert json.loads((broken / "head.json").read_text())["round"] < 16

    # the ranks end with the process that started them
    again = command("resume", broken, "--devices", "cpu,cpu")
    resumed = subprocess.Popen(again, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(ranks := children_of(resumed.pid)) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    resumed.kill()
    resumed.wait()
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)

    ended = subprocess.run(again, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert state_of(broken) == state_of(whole)
    assert (broken / "rows/records").read_bytes()  # private rows of all ranks in one file
