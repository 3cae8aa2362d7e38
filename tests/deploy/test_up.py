"""A federation with real processes: TLS, keys and the proxy; nodes that cheat, processes that are killed,
strangers at the door."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.deploy.enrolment import Enrolment  # noqa: E402
from holdfast.deploy.keys import make_node_key  # noqa: E402
from holdfast.deploy.processes import _environments, free_port  # noqa: E402
from holdfast.deploy.project import init  # noqa: E402
from holdfast.deploy.up import RunningFederation  # noqa: E402
from holdfast.results.run import Run  # noqa: E402
from holdfast.storage.store import read_tensors  # noqa: E402
from tests.deploy.real_federation import (  # noqa: E402
    EXPERIMENT,
    PATIENT,
    found,
    model_of,
    run_federation,
    simulated,
)

pytestmark = pytest.mark.slow


def test_a_boosted_node_is_banned_by_fedcap_and_stays_banned(tmp_path: Path) -> None:
    project = found(tmp_path, clients=4, rounds=4, method="fedcap")
    up, said = run_federation(project, {1: "fields['update'] = Array(-20 * fields['update'].numpy())"})
    ledger = project.ledger()
    (ban,) = ledger.of("ban")
    assert (
        ban.client == 1
        and ban.what["by"] == "method"
        and any(line.startswith("client 1 is banned") for line in said)
    )
    rounds = ledger.of("round")
    after = [entry.what["took_part"] for entry in rounds if (entry.round or 0) > (ban.round or 0)]
    assert after and all(1 not in took_part for took_part in after) and after[-1] == [0, 2, 3]
    assert (project.node(0) / "state").exists() and Run(project.run).final["accuracy"] > 0.2
    # Everything is started again, for another run, and the node is honest at last: it gets nothing.
    for file in (project.experiment, *(project.node(c) / "experiment.toml" for c in range(4))):
        file.write_text(file.read_text().replace("seed = 3", "seed = 4").replace("rounds = 4", "rounds = 2"))
    (project.run).rename(project.server / "first-run")
    run_federation(project)
    assert 1 in Enrolment.of(project.ledger().entries).banned
    assert all(1 not in entry.what["took_part"] for entry in project.ledger().of("round")[len(rounds) :])
    assert len(project.ledger().of("round")) > len(rounds)


VICTIMS = [
    ("superlink",),
    ("superexec", "proxy"),
    ("trainer0", "forks"),
    ("node1", "serverapp"),
]
"""Those of one group are killed together, each group in another round."""


def pids_of(up: RunningFederation, victim: str) -> list[int]:
    if victim == "serverapp":
        return [
            pid
            for pid in up.processes.alive()
            if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
    if victim == "forks":
        assert up.processes.forks is not None
        return [up.processes.forks.process.pid]
    return [up.processes.started[victim].pid]


@pytest.mark.long
def test_processes_killed_in_mid_round_leave_the_undisturbed_model(tmp_path: Path) -> None:
    """`quorum` 1: a round waits for the node that was killed until it is back."""
    rounds = len(VICTIMS) + 1
    project = found(tmp_path, clients=3, rounds=rounds, method="ditto", quorum=1.0, wait=PATIENT)
    killed: dict[str, list[int]] = {}

    def kill(up: RunningFederation, line: str) -> None:
        if line.startswith("round ") and "took part" in line and len(killed) < len(sum(VICTIMS, ())):
            group = VICTIMS[int(line.removeprefix("round ").partition(":")[0]) - 1]
            time.sleep(0.5)  # into the next round
            for victim in group:
                killed[victim] = pids_of(up, victim)
                for pid in killed[victim]:
                    os.kill(pid, signal.SIGKILL)

    run_federation(project, disturb=kill)
    assert list(killed) == list(sum(VICTIMS, ())) and all(killed.values())
    assert torch.equal(model_of(project.run), model_of(simulated(project, tmp_path / "sim")))
    assert [entry.round for entry in project.ledger().of("round")] == [*range(1, rounds + 1)]
    assert project.ledger().of("strike", "ban") == []


def test_unauthenticated_nodes_are_refused(tmp_path: Path) -> None:
    """No key, a key that nobody registered, another authority; and somebody who tries to register himself
    through the proxy."""
    project, other = found(tmp_path, clients=1), init(tmp_path / "other", 1, port=free_port())
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    make_node_key(stranger, "stranger")
    address, authority = project.settings.address, project.server / "ca.pem"

    def is_told(words: str, *options: str) -> bool:
        """A SuperNode with these options is refused with these words; it may take its time to stop."""
        own = ["--host", "127.0.0.1", "--port", str(free_port()), "--max-retries", "1"]
        name = f"stranger{len(up.processes.started)}"
        up.processes.start(name, "flower-supernode", "--superlink", address, *own, *options)
        end = time.monotonic() + 240
        while (
            words not in (project.logs / f"{name}.log").read_text(errors="replace") and time.monotonic() < end
        ):
            time.sleep(0.5)
        return words in (project.logs / f"{name}.log").read_text(errors="replace")

    with RunningFederation(project, lambda line: None, nodes=False) as up:
        known = ["--root-certificates", str(authority)]
        assert is_told("[code: 2001]", *known)
        assert is_told("[code: 2004]", *known, "--auth-supernode-private-key", str(stranger / "key"))
        foreign = [
            "--root-certificates",
            str(other.server / "ca.pem"),
            "--auth-supernode-private-key",
            str(project.node(0) / "key"),
        ]
        assert is_told("could not establish a connection", *foreign)
        context = ssl.create_default_context(cafile=authority)
        for path in ("/v1/control/register-node", "/v1/control/start-run", "/openapi.json", "/v1/runtime/x"):
            assert httpx.post(f"https://{address}{path}", verify=context, timeout=60).status_code == 403
        nodes = up.processes.flwr("supernode", "list", "link")["nodes"]
        assert [node["status"] for node in nodes] == [
            "registered"
        ]  # the one that was enrolled, and it has not come
        with socket.socket() as probe:  # the SuperLink itself is not reachable from outside this machine
            assert probe.connect_ex(("127.0.0.1", up.port)) == 0
        assert any(
            b"--host\x00127.0.0.1" in Path(f"/proc/{pid}/cmdline").read_bytes()
            for pid, _ in _environments()
            if pid == up.processes.started["superlink"].pid
        )


def test_the_commands_of_an_operator_from_init_to_export(tmp_path: Path) -> None:
    """init, up, status, clients, export of a personal model, as commands."""
    ward = tmp_path / "ward"

    def holdfast(*args: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.cli", "federation", *args],
            capture_output=True,
            text=True,
            timeout=PATIENT,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    experiment = tmp_path / "experiment.toml"
    experiment.write_text(EXPERIMENT.format(clients=2, rounds=1, method="ditto"))
    holdfast("init", str(ward), "--clients", "2", "--port", str(free_port()), "--experiment", str(experiment))
    assert "finished: accuracy" in holdfast("up", str(ward))
    assert "finished" in holdfast("status", str(ward)) and "active" in holdfast("clients", str(ward))
    holdfast("export", str(ward), str(tmp_path / "mine.safetensors"), "--node", str(ward / "nodes" / "1"))
    holdfast("export", str(ward), str(tmp_path / "global.safetensors"))
    mine, shared = read_tensors(tmp_path / "mine.safetensors"), read_tensors(tmp_path / "global.safetensors")
    assert mine.keys() == shared.keys() and any(not torch.equal(mine[name], shared[name]) for name in mine)
    assert "superlink" in holdfast("logs", str(ward))
