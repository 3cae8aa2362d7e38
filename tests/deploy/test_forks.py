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
