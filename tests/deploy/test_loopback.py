"""The second world for real: SuperLink, SuperNodes and the apps as processes on this machine give the simulator's bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.errors import RunError  # noqa: E402
from holdfast.deploy.loopback import Loopback  # noqa: E402
from holdfast.deploy.processes import _environments  # noqa: E402
from holdfast.store import read_json, read_tensors  # noqa: E402
from tests.deploy.worlds import assert_same_runs, keep_states, node_states, private_rows, same_bits, simulate, write_config  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks for left processes in /proc")]
ROUNDS = 2


@contextmanager
def keeping(run: Path, into: Path) -> Iterator[None]:
    """Keep the committed state of every round while a run goes on."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            keep_states(run, into)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        keep_states(run, into)


def assert_worlds_agree(federation: Loopback, method: str, folder: Path) -> None:
    config = write_config(folder, method, ROUNDS)
    sim, fed = folder / f"{method}-sim", folder / f"{method}-fed"
    private: dict[int, dict] = {}

    def moved(experiment: object) -> None:
        keep_states(sim, folder / f"{method}-sim-states")
        head = read_json(sim / "head.json")  # a state file alone may be of a round that is ready but not yet committed
        if head is not None:  # round 0 is first made ready, too
            private.setdefault(head["round"], private_rows(sim))

    simulate(config, sim, moved=moved)
    with keeping(fed, folder / f"{method}-fed-states"):
        outcome = federation.run(config, fed, timeout=400)
    assert outcome.result["final"]["accuracy"] > 0.2
    assert_same_runs(sim, fed, ROUNDS)
    for round in range(1, ROUNDS + 1):
        servers = [read_tensors(folder / f"{method}-{world}-states" / f"{round:06d}.safetensors") for world in ("sim", "fed")]
        models = [{"model": server["server/model"]} for server in servers]
        assert same_bits(models[0], models[1]), f"{method}: the server's weights of round {round}"
        states = node_states(folder / "flower", round) if method == "ditto" else {}
        assert states.keys() == private[round].keys()
        for client, state in states.items():
            assert same_bits(state, private[round][client]), f"{method}: the weights of client {client} in round {round}"


def test_the_loopback_federation_has_the_simulators_bits(tmp_path: Path) -> None:
    """FedAvg and Ditto, one after the other on the same nodes: metrics and weights of every round, bit by bit."""
    with Loopback(tmp_path / "flower", clients=3) as federation:
        for method in ("fedavg", "ditto"):
            assert_worlds_agree(federation, method, tmp_path)
        assert federation.alive()
    assert not federation.alive()


def test_a_run_that_fails_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg", top='attack = "no-such-attack"')
    with pytest.raises(RunError, match="unknown attack 'no-such-attack'"), Loopback(tmp_path / "flower", clients=1) as federation:
        federation.run(config, tmp_path / "fed", timeout=400)
    assert not federation.alive()


def test_a_killed_launcher_takes_its_federation_with_it(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg", rounds=50)
    command = [sys.executable, "-m", "holdfast.deploy.loopback", str(config), "--out", str(tmp_path / "fed")]
    launcher = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    mark = f"FLWR_HOME={tmp_path / 'fed' / 'flower' / 'home'}".encode()

    def alive() -> list[int]:
        return [pid for pid, environment in _environments() if mark in environment.split(b"\0")]

    try:
        end = time.monotonic() + 300  # generous: on a busy machine eight Pythons that import Flower take over a minute
        while len(alive()) < 6 and time.monotonic() < end:  # SuperLink, 3 SuperNodes, and some of what these start
            time.sleep(0.2)
        assert len(alive()) >= 6
    finally:
        launcher.kill()
        launcher.wait()
    end = time.monotonic() + 120
    while alive() and time.monotonic() < end:
        time.sleep(0.2)
    left = alive()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
