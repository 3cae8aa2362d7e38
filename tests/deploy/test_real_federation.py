"""What a federation of real processes has to live with: nodes that send too much, too little, too late or
twice; nobody left to ask; clients that come, go and change their keys; a committee without one of its
members."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import Message  # noqa: E402

from holdfast.core.reading import read_json  # noqa: E402
from holdfast.deploy.enrolment import Enrolment, fingerprint_of  # noqa: E402
from holdfast.deploy.privacy import Account  # noqa: E402
from holdfast.deploy.processes import Processes, free_port  # noqa: E402
from holdfast.deploy.project import Project, enrol, init, open_project  # noqa: E402
from holdfast.deploy.server_app import serve  # noqa: E402
from holdfast.deploy.up import RunningFederation  # noqa: E402
from holdfast.results.run import Run  # noqa: E402
from holdfast.storage.store import Store, read_tensors  # noqa: E402
from tests.deploy.hostile_node import corrupt  # noqa: E402
from tests.deploy.local_grid import LocalGrid, Tamper  # noqa: E402
from tests.deploy.real_federation import PATIENT, found, model_of, run_federation, simulated  # noqa: E402

pytestmark = pytest.mark.slow


def rewrite(project: Project, old: str, new: str) -> None:
    """Change the experiment, for everybody."""
    for file in (project.experiment, *project.path.glob("nodes/*/experiment.toml")):
        file.write_text(file.read_text().replace(old, new))


HUGE = """
def change(reply, request):
    if asked(request)[0] == 'train':
        reply.content['fields']['update'] = Array(np.random.rand({numbers}).astype(np.float32))
    return reply
"""
FLOOD = HUGE.replace("== 'train'", "== 'train' and asked(request)[1] == 1")
OLD = """
def change(reply, request):
    note = here / 'nonce'
    if asked(request) == ('train', 1):
        note.write_text(reply.content['post']['nonce'])
    elif asked(request)[0] == 'train':
        reply.content['post'] = ConfigRecord({'nonce': note.read_text()})
    return reply
"""
TWICE = """
from flwr.supernode.fleet_http_client import FleetHttpClient
announce, before = FleetHttpClient.PushMessages, []
def twice(self, request):
    for sent in before:  # the reply to the last letter, again: the server has it already
        try:
            announce(self, sent)
        except Exception as error:
            print('the second time:', error, flush=True)
        (here / 'twice').touch()
    before[:] = [request]
    return announce(self, request)
FleetHttpClient.PushMessages = twice
def change(reply, request):
    return reply
"""
IMPOSTOR = """
import json
from flwr.supernode.fleet_http_client import FleetHttpClient
announce = FleetHttpClient.PushMessages
def disguised(self, request):
    others = {int(node) for node in json.loads((server / 'registered.json').read_text()).values() if node}
    for message in request.messages_list:
        message.metadata.src_node_id = min(others - {message.metadata.src_node_id})
        (here / 'disguised').touch()
    return announce(self, request)
FleetHttpClient.PushMessages = disguised
def change(reply, request):
    return reply
"""
HALF = """
import holdfast.deploy.fleet_connection as connection
push = connection.push_objects
def half(*args, **options):
    if not (here / 'half').exists():
        push(*args, **options)
connection.push_objects = half
def change(reply, request):
    (here / 'half').touch() if asked(request) == ('train', 1) else (here / 'half').unlink(missing_ok=True)
    return reply
"""


@pytest.mark.long
def test_many_bad_nodes_at_once(tmp_path: Path) -> None:
    """Too much, far too much, an old round, everything twice, a reply that is announced and never comes, and
    all replies in another node's name. `quorum` is such that a round has to wait for all who answer at all,
    however slow the machine is."""
    project = found(
        tmp_path, clients=8, rounds=2, strikes=1, deadline=60.0, quorum=0.6, wait=PATIENT, quota=30_000_000
    )
    rewrite(project, "[engine]", "[evaluate]\nevery = 2\n[engine]")
    up = RunningFederation(project, lambda line: None)
    lies = {
        2: HUGE.format(numbers=300_000),
        3: FLOOD.format(numbers=10_000_000),
        4: OLD,
        5: TWICE,
        6: HALF,
        7: IMPOSTOR,
    }
    for client, code in lies.items():
        up.processes.extra[f"node{client}"] = corrupt(project, client, code + "lie(change)\n")
    with up:
        up.run(timeout=PATIENT)
    assert not up.processes.alive()
    ledger = project.ledger()
    reasons = {entry.client: entry.what["reason"] for entry in ledger.of("strike")}
    assert reasons.keys() == {2, 7} and "sent a message in the name of node" in reasons[7]
    assert "bytes, which its task allows" in reasons[2] and Enrolment.of(ledger.entries).banned.keys() == {
        2,
        7,
    }
    trains = {
        entry.round: entry.what["clients"] for entry in ledger.of("missing") if entry.what["task"] == "train"
    }
    for round in trains:
        trains[round].pop(
            "7", None
        )  # whether it is banned before it is asked or only after is a matter of seconds
    # of 3 the quota is spent before its envelope is sent
    halves = "its answer was announced and did not come within 60 s"
    assert trains[1] == {"3": halves, "6": halves} and trains[2] == {
        "4": "a reply that cannot be attributed: wrong nonce"
    }
    assert [entry.what["ids"] for entry in ledger.of("round")] == [[0, 1, 4, 5], [0, 1, 3, 5, 6]]
    assert (project.path / "cheat5" / "twice").exists() and (project.path / "cheat7" / "disguised").exists()
    assert "federation.quota" in (project.logs / "proxy.log").read_text()

    def lost(request: Message, reply: Message) -> Message | None:
        client, round = (
            request.metadata.dst_node_id - 1000,
            request.content["header"]["round"] if "header" in request.content else 0,
        )
        gone = {2: (1, 2), 3: (1,), 4: (2,), 6: (1,), 7: (1, 2)}.get(client, ())
        return None if request.metadata.message_type == "train" and round in gone else reply

    assert torch.equal(model_of(project.run), model_of(in_process(project, tmp_path / "fed", 8, lost)))


def in_process(
    project: Project, out: Path, clients: int, tamper: Tamper | None = None, homes: bool = False
) -> Path:
    """The same experiment on a grid without processes."""
    settings = {"config": str(project.experiment), "out": str(out), "deadline": 1.0, "join": 60.0}
    grid = LocalGrid(out.parent / f"{out.name}-nodes", settings, clients=clients, tamper=tamper)
    for client, context in enumerate(grid.nodes.values()):
        if homes:
            context.node_config["home"] = str(project.node(client))
    serve(grid, settings)
    return out


# ---- everything is gone, and comes back

DECLARED = """
seed = 3
[data]
name = "declared"
clients = 2
split = { train = 0.7, validation = 0.1, test = 0.2 }
[data.options]
shape = [6]
classes = 2
least = 10
most = 100
[model]
name = "mlp"
hidden = 8
[method]
name = "ditto"
[train]
rounds = 3
local_epochs = 1
[engine]
threads = 1
"""
OWN = """
import numpy as np
def load():
    rng = np.random.default_rng(CLIENT)
    y = np.arange(60) % 2
    return rng.normal(size=(60, 6)) + y[:, None], y
"""


class Command:
    """`holdfast federation ...`, followed by what it says."""

    def __init__(self, folder: Path, *args: object):
        self.said = folder / f"{'-'.join(map(str, args[:1]))}-{time.monotonic_ns()}.txt"
        with open(self.said, "wb") as file:
            command = [sys.executable, "-m", "holdfast.cli", "federation", *map(str, args)]
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    @property
    def text(self) -> str:
        return self.said.read_text()

    def end(self) -> int:
        return self.process.wait(PATIENT)


def until(what: Callable[[], Any], *watched: Command) -> None:
    """Wait for it; a command that ends before is a failure, with its own words."""
    end = time.monotonic() + PATIENT
    while not what():
        for command in watched:
            assert command.process.poll() is None, command.text
        assert time.monotonic() < end
        time.sleep(0.2)


def operator(*args: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "federation", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=PATIENT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def settle(project: Project, **settings: float) -> None:
    lines = (project.path / "federation.toml").read_text().splitlines()
    kept = [line for line in lines if line.partition(" =")[0] not in settings]
    (project.path / "federation.toml").write_text(
        "\n".join([*kept, *(f"{key} = {value}" for key, value in settings.items())]) + "\n"
    )


@pytest.mark.long
def test_all_nodes_gone_then_back_with_data_of_their_own(tmp_path: Path) -> None:
    """The run waits, says so, and ends by its own patience. Later it goes on, a trainer is killed, and
    nothing of it can be seen in the model."""
    (tmp_path / "experiment.toml").write_text(DECLARED)
    project = init(tmp_path / "ward", 2, port=free_port(), experiment=tmp_path / "experiment.toml")
    settle(project, quorum=1.0, wait=10.0)
    for client in range(2):
        (project.node(client) / "mine.py").write_text(OWN.replace("CLIENT", str(client)))
        text = (
            (project.node(client) / "node.toml")
            .read_text()
            .replace('function = ""', 'function = "mine.py:load"')
        )
        (project.node(client) / "node.toml").write_text(text)
        assert "42 train, 6 validation, 12 test" in operator("check-node", project.node(client))
    on_nodes = [Processes(project.node(client) / "flower", project.logs) for client in range(2)]

    def committed() -> int:
        return len(project.ledger().of("round"))

    def begin(command: str) -> tuple[Command, list[Command]]:
        return Command(tmp_path, command, project.path, "--server-only"), [
            Command(tmp_path, "node", project.node(c)) for c in range(2)
        ]

    up, nodes = begin("up")
    try:
        until(lambda: committed() >= 1, up, *nodes)
        nodes[0].process.send_signal(signal.SIGINT)
        nodes[1].process.kill()
        assert up.end() == 2
        last = up.text.splitlines()[-1]
        assert "waiting up to 10 s for more clients" in up.text and last.startswith(
            "error: the run stopped (round"
        ), up.text
        assert (
            "10 s of waiting are over" in last
            and "holdfast federation resume" in last
            and "Traceback" not in up.text
        )
        assert nodes[0].end() == 130 and nodes[1].end() == -signal.SIGKILL
        until(lambda: not any(processes.alive() for processes in on_nodes))
        assert not Processes(project.server / "flower", project.logs).alive()

        settle(open_project(project.path), wait=PATIENT)
        done = committed()
        up, nodes = begin("resume")
        until(lambda: committed() > done, up, *nodes)
        trainers = [
            pid for pid in on_nodes[0].alive() if Path(f"/proc/{pid}/comm").read_text().startswith("trainer")
        ]
        assert trainers
        for pid in trainers:
            os.kill(pid, signal.SIGKILL)
        assert up.end() == 0, up.text
        assert "finished: accuracy" in up.text
    finally:
        for command in (up, *nodes):
            command.process.send_signal(signal.SIGINT)
        for command in (up, *nodes):
            command.end()
    assert not any(processes.alive() for processes in on_nodes)
    assert [entry.round for entry in project.ledger().of("round")] == [1, 2, 3]
    assert torch.equal(model_of(project.run), model_of(in_process(project, tmp_path / "fed", 2, homes=True)))
    operator("export", project.path, tmp_path / "global.safetensors")
    operator("export", project.path, tmp_path / "mine.safetensors", "--node", project.node(1))
    shared, mine = read_tensors(tmp_path / "global.safetensors"), read_tensors(tmp_path / "mine.safetensors")
    assert shared.keys() == mine.keys() and any(not torch.equal(shared[name], mine[name]) for name in shared)


# ---- who comes and goes


@pytest.mark.long
def test_joining_leaving_and_a_new_key_in_mid_run(tmp_path: Path) -> None:
    """Client 3 comes later, 1 leaves and comes back, 2 gets a new key, 0 clips and noises what it sends.
    `quorum` 1: a round waits for everybody who is in the federation at that time."""
    project = found(tmp_path, clients=4, rounds=6, quorum=1.0, wait=PATIENT)
    with open(project.node(0) / "node.toml", "a") as file:
        file.write("\n[privacy]\nclip = 1.0\nnoise = 0.01\n")
    old = (project.node(2) / "key.pub").read_text()
    operator("leave", project.path, 3)
    told: list[
        str
    ] = []  # what the commands write, here without a new Python for each: a busy machine would play all rounds meanwhile  # noqa: E501

    def in_mid_run(up: RunningFederation, line: str) -> None:
        if line.startswith("round ") and "took part" in line and len(told) < 2:
            told.append(line)
            if len(told) == 1:
                project.ledger().append("leave", 1)
            for client in (3, 2) if len(told) == 1 else (1,):
                enrol(project, client)

    _, said = run_federation(project, disturb=in_mid_run)
    assert {
        "client 1 has left",
        "client 3 has a new key",
        "client 2 has a new key",
        "client 1 has a new key",
    } <= set(said)
    ledger = project.ledger()
    took_part = {entry.number: entry.what["took_part"] for entry in ledger.of("round")}
    (left,) = [entry.number for entry in ledger.of("leave") if entry.client == 1]
    (back,) = [entry.number for entry in ledger.of("rotate") if entry.client == 1]
    assert took_part[min(took_part)] == [0, 1, 2] and took_part[max(took_part)] == [0, 1, 2, 3]
    assert all(
        1 not in clients
        for clients in [took_part[number] for number in took_part if left < number < back][1:]
    )  # one was going on
    who = Enrolment.of(ledger.entries)
    assert who.client_of(old) is None and who.banned == {} and ledger.of("strike") == []
    registered = read_json(project.server / "registered.json") or {}
    assert registered[fingerprint_of(old)] == "" and registered[who.members[2].fingerprint] != ""
    spent = Account(project.node(0) / "state").spent(1e-5)
    assert spent["participations"] >= 4 and spent["epsilon/client"] > 0
    assert float(operator("privacy", project.node(0))) == pytest.approx(spent["epsilon/client"], rel=1e-4)
    assert bool(torch.isfinite(model_of(project.run)).all())


# ---- a committee

MEMBER_GOES_DOWN = """
import signal
def change(reply, request):
    if asked(request) == ('score', 1) and not request.content['header']['discard_state'] and not (here / 'gone').exists():
        (here / 'gone').touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return reply
lie(change)
"""  # noqa: E501


def test_a_committee_round_with_a_member_down(tmp_path: Path) -> None:
    """C-PFL: while it scores, a member's node goes down. The others' votes decide, and nobody is banned for
    it."""
    project = found(tmp_path, clients=4, rounds=1, method="c-pfl", quorum=0.5, wait=PATIENT)
    rewrite(project, "[model]", "split = { train = 0.6, validation = 0.2, test = 0.2 }\n[model]")
    members = (
        Store(simulated(project, tmp_path / "sim")).arrays(1)["verdict/tables/committee/members"].tolist()
    )
    assert len(members) == 2
    down, up = members[0], RunningFederation(project, lambda line: None)
    up.processes.extra[f"node{down}"] = corrupt(project, down, MEMBER_GOES_DOWN)
    with up:
        up.run(timeout=PATIENT)
    assert not up.processes.alive()
    silent = [entry for entry in project.ledger().of("missing") if entry.what["task"] == "score"]
    assert silent and all(str(down) in entry.what["clients"] for entry in silent)
    votes = Store(project.run).arrays(1)["verdict/tables/committee/votes"]
    assert torch.isfinite(votes).sum() > 0
    assert (
        Enrolment.of(project.ledger().entries).banned == {} and Run(project.run).final["accuracy"] is not None
    )
