"""The second world for real: SuperLink, SuperNodes and the apps as processes on this machine give the
simulator's bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.core.errors import RunError  # noqa: E402
from holdfast.core.types import State  # noqa: E402
from holdfast.deploy.loopback import Loopback  # noqa: E402
from holdfast.deploy.processes import _environments  # noqa: E402
from holdfast.storage.store import read_json, read_tensors  # noqa: E402
from tests.deploy.worlds import (  # noqa: E402
    assert_same_runs,
    keep_node_states,
    keep_states,
    node_states,
    private_rows,
    same_bits,
    simulate,
    write_config,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for left processes in /proc")
PATIENT = 900.0  # seconds: a busy machine needs minutes for what an idle one does in half of one
VALIDATION = "split = { train = 0.6, validation = 0.2, test = 0.2 }"


@dataclass(frozen=True)
class Trial:
    """An experiment that both worlds play."""

    name: str
    method: str
    sections: dict[str, str] = field(default_factory=dict)
    rounds: int = 2
    after: int = 0
    """Rounds that the method adds after the last: some tune then."""
    private: bool = False
    """Whether clients keep something from round to round."""


TRIALS = (
    Trial("fedavg", "fedavg"),
    Trial("ditto", "ditto", private=True),
    Trial("fedcap", "fedcap", private=True),
    Trial("fedas", "fedas", private=True),
    Trial("c-pfl", "c-pfl", {"data": VALIDATION}, after=1, private=True),
    Trial("fedcom", "fedcom", private=True),
    Trial("fedavg-fedcpa", "fedavg", {"top": 'aggregator = "fedcpa"'}),
    Trial("fedavg-rfa", "fedavg", {"top": 'aggregator = "rfa"'}),
    Trial(
        "fedavg-adam",
        "fedavg",
        {"top": 'optimizer = { name = "adam", persist = true }', "momentum": ""},
        private=True,
    ),
)


@contextmanager
def keeping(keep: Callable[[], None]) -> Iterator[None]:
    """Keep what is there of every round while a run goes on."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            keep()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        keep()


def simulated(trial: Trial, config: Path, folder: Path) -> tuple[Path, dict[int, dict[int, State]]]:
    """The simulator's run, and what its clients kept after every round."""
    out, private = folder / f"{trial.name}-sim", {}

    def moved(experiment: object) -> None:
        keep_states(out, folder / f"{trial.name}-sim-states")
        head = read_json(
            out / "head.json"
        )  # a state file alone may be of a round that is ready but not yet committed
        if head is not None:  # round 0 is first made ready, too
            private.setdefault(head["round"], private_rows(out))

    return simulate(config, out, moved=moved), private


def assert_worlds_agree(federation: Loopback, trial: Trial, folder: Path) -> None:
    """All figures, verdicts and clients' figures of every round; all that server and clients keep, after
    every round: bit by bit."""
    config = write_config(
        folder, trial.method, trial.rounds, trial.name, federation.clients, **trial.sections
    )
    sim, private = simulated(trial, config, folder)
    fed, kept, disks = (
        folder / f"{trial.name}-fed",
        folder / f"{trial.name}-fed-states",
        folder / f"{trial.name}-nodes",
    )

    def keep() -> None:
        keep_states(fed, kept)
        keep_node_states(federation.home, fed, disks)

    with keeping(keep):
        outcome = federation.run(
            config, fed, timeout=PATIENT, everybody=True
        )  # a busy machine may lose a message: it is sent again
    assert outcome.result["final"]["accuracy"] > 0.2
    last = trial.rounds + trial.after
    assert_same_runs(sim, fed, last)
    for round in range(1, last + 1):
        servers = [
            read_tensors(states / f"{round:06d}.safetensors")
            for states in (folder / f"{trial.name}-sim-states", kept)
        ]
        for server in servers:
            server.pop("rows/index", None)  # where the simulator keeps its clients' rows; nodes have disks
        assert "server/model" in servers[0] and same_bits(servers[0], servers[1]), (
            f"{trial.name}: the server's state of round {round}"
        )
        states = node_states(disks, round)
        assert states.keys() == private[round].keys() and bool(states) == trial.private
        for client, state in states.items():
            assert same_bits(state, private[round][client]), (
                f"{trial.name}: the state of client {client} in round {round}"
            )


@pytest.mark.slow
def test_two_nodes_have_the_simulators_bits(tmp_path: Path) -> None:
    """The shortest real federation: FedAvg, one round; nodes without a trainer, who do all their work in the
    process that talks to the server."""
    with Loopback(tmp_path / "flower", clients=2, resident=False) as federation:
        assert_worlds_agree(federation, Trial("fedavg", "fedavg", rounds=1), tmp_path)
        assert federation.alive()
    assert not federation.alive()


@pytest.mark.long
@pytest.mark.slow
def test_every_method_has_the_simulators_bits(tmp_path: Path) -> None:
    """One after the other on the same nodes, each with a resident trainer."""
    with Loopback(tmp_path / "flower", clients=3) as federation:
        for trial in TRIALS[:-1]:  # the last has a test of its own
            assert_worlds_agree(federation, trial, tmp_path)
    assert not federation.alive()


@pytest.mark.slow
def test_adam_has_the_simulators_bits(tmp_path: Path) -> None:
    """Two rounds, in which nodes keep the optimiser's state; the private state of FedAvg is nothing else."""
    (trial,) = (trial for trial in TRIALS if trial.name == "fedavg-adam")
    with Loopback(tmp_path / "flower", clients=2) as federation:
        assert_worlds_agree(federation, trial, tmp_path)


@pytest.mark.slow
def test_a_run_that_fails_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg", top='attack = "no-such-attack"')
    with (
        pytest.raises(RunError, match="unknown attack 'no-such-attack'"),
        Loopback(tmp_path / "flower", clients=1) as federation,
    ):
        federation.run(config, tmp_path / "fed", timeout=PATIENT)
    assert not federation.alive()


@pytest.mark.slow
def test_a_killed_launcher_takes_its_federation_with_it(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg", rounds=50)
    command = [sys.executable, "-m", "holdfast.deploy.loopback", str(config), "--out", str(tmp_path / "fed")]
    launcher = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    mark = f"FLWR_HOME={tmp_path / 'fed' / 'flower' / 'home'}".encode()

    def alive() -> list[int]:
        return [pid for pid, environment in _environments() if mark in environment.split(b"\0")]

    try:
        end = (
            time.monotonic() + 300
        )  # generous: on a busy machine eight Pythons that import Flower take over a minute
        while len(alive()) < 6 and time.monotonic() < end:  # SuperLink, and 3 nodes with 2 processes each
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
