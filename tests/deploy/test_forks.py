"""Processes that are forked: they end as others do, and with those that asked for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.errors import RunError
from holdfast.deploy import forks
from holdfast.deploy.forks import Fork, ForkServer, _lives
from holdfast.deploy.processes import begin_as_parent

PROGRAM = """
import os, random, sys, threading, time
def main():
    assert threading.active_count() == 1
    name = open("/proc/self/comm").read().strip()
    print(sys.argv[1:], os.environ["TOLD"], random.random(), name, flush=True)
    if sys.argv[1] == "raise":
        raise ValueError("no")
    if sys.argv[1].isdigit():
        sys.exit(int(sys.argv[1]))
    time.sleep(600)
"""
LIGHT = "from holdfast.deploy import forks; forks._PRELOADED = (); import sys; forks.main()"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    """Without torch in memory: these forks need none."""
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])

    def popen(command: list[str], file: int) -> subprocess.Popen[bytes]:
        light = [sys.executable, "-c", LIGHT, *command[3:]]
        return subprocess.Popen(light, env={**os.environ, "PYTHONPATH": path}, pass_fds=(file,))

    made = ForkServer(popen)
    yield made
    made.close()


def begin(server: ForkServer, folder: Path, *arguments: str) -> Fork:
    return server.start(
        f"node{arguments[0]}", "program", list(arguments), {"TOLD": "yes"}, folder / "log.txt"
    )


def until(what: object) -> None:
    end = time.monotonic() + 60
    while not what() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.05)
    assert what()  # type: ignore[operator]


def test_forks_run_with_their_own_settings_and_their_ends_are_reported(
    server: ForkServer, tmp_path: Path
) -> None:
    assert begin(server, tmp_path, "0").wait(60) == 0 and begin(server, tmp_path, "75").wait(60) == 75
    assert begin(server, tmp_path, "raise").wait(60) == 1
    sleeper, other = begin(server, tmp_path, "sleep"), begin(server, tmp_path, "more")
    assert sleeper.poll() is None and sleeper.pid != other.pid
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.2)
    sleeper.terminate()
    other.kill()
    assert (sleeper.wait(60), other.wait(60)) == (-signal.SIGTERM, -signal.SIGKILL)
    sleeper.kill()  # it is gone: nothing happens
    said = (tmp_path / "log.txt").read_text()
    drawn = [line.split()[2] for line in said.splitlines() if line.startswith("['")]
    assert "['75'] yes" in said and "ValueError: no" in said and "nodesleep" in said
    assert len(drawn) == len(set(drawn)) == 5, "no two draw the same numbers"
    assert (tmp_path / "log.txt").stat().st_mode & 0o077 == 0


def test_forks_end_with_the_process_that_forks_and_a_frozen_one_hides_no_end(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "_REPORT", 0.2)
    first, second = begin(server, tmp_path, "one"), begin(server, tmp_path, "two")
    server.process.send_signal(signal.SIGSTOP)
    first.kill()
    assert first.wait(60) == -signal.SIGKILL  # nobody has reported it
    server.process.kill()
    assert second.wait(60) == -signal.SIGKILL and not _lives(second.pid)
    with pytest.raises(RunError, match="the process that starts the nodes' processes has ended"):
        begin(server, tmp_path, "three")


def test_closing_it_ends_its_forks(server: ForkServer, tmp_path: Path) -> None:
    child = begin(server, tmp_path, "one")
    server.close()
    until(lambda: not _lives(child.pid))
    assert server.process.returncode == 0


HERE = """
import os, sys, time
from pathlib import Path
from holdfast.deploy import forks, processes
forks._PRELOADED = ()
processes.begin_as_parent(Path(sys.argv[1]) / "flower", Path(sys.argv[1]) / "logs")
keeper = processes.Processes(Path(sys.argv[1]) / "flower", Path(sys.argv[1]) / "logs")
child = keeper.fork("node1", "program", "sleep")
parent = int(Path(f"/proc/{keeper.forks.process.pid}/stat").read_text().rpartition(")")[2].split()[1])
both = sorted([child.pid, keeper.forks.process.pid])
print(parent == os.getpid(), sorted(keeper.alive()) == both, flush=True)
if len(sys.argv) > 2:
    print(child.pid, keeper.forks.process.pid, flush=True)
    time.sleep(600)
keeper.stop()
print(keeper.alive(), flush=True)
"""


def test_a_program_begins_again_as_the_parent_of_its_forks(tmp_path: Path) -> None:
    """It is known by its name; others, as this one, are left alone."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "holdfast").write_text(HERE)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    command = [sys.executable, str(tmp_path / "holdfast"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": path, "TOLD": "yes"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "True", "[]"], done.stderr
    begin_as_parent(tmp_path / "flower", tmp_path / "logs")
    with subprocess.Popen([*command, "wait"], env=environment, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        keeper.stdout.readline()
        left = [int(word) for word in keeper.stdout.readline().split()]
        assert len(left) == 2 and all(map(_lives, left))
        keeper.kill()
    until(lambda: not any(map(_lives, left)))
