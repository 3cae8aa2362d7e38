"""Attacks of a node with a valid key on a federation of real processes. The proxy refuses most of this; here
the attacker stands behind it, on the SuperLink's own port, and still reaches nobody. Threats and tests are
listed in docs/federation.md."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import ConfigRecord, Message, RecordDict  # noqa: E402
from flwr.app.message import remove_content_from_message  # noqa: E402
from flwr.app.metadata import Metadata  # noqa: E402
from flwr.common.serde import message_to_proto  # noqa: E402
from flwr.proto.fleet_pb2 import PushMessagesRequest  # noqa: E402
from flwr.proto.message_pb2 import PushObjectRequest  # noqa: E402
from flwr.proto.node_pb2 import Node  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree  # noqa: E402
from flwr.supernode.fleet_http_client import FleetHttpClient  # noqa: E402
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor  # noqa: E402

from holdfast.deploy.enrolment import Enrolment, fingerprint_of  # noqa: E402
from holdfast.deploy.keys import load_private  # noqa: E402
from holdfast.deploy.project import Project  # noqa: E402
from holdfast.deploy.up import RunningFederation  # noqa: E402
from tests.deploy.hostile_node import corrupt  # noqa: E402
from tests.deploy.real_federation import PATIENT, cheat, found, model_of, simulated  # noqa: E402

pytestmark = pytest.mark.slow


class Attacker:
    """A program of its own that has the key of one client."""

    def __init__(self, up: RunningFederation, project: Project, client: int):
        known = json.loads((project.server / "registered.json").read_text())
        self.nodes = {
            c: int(known[fingerprint_of((project.node(c) / "key.pub").read_text())]) for c in range(3)
        }
        self.node, self.run = (
            Node(node_id=self.nodes[client]),
            int(up.processes.flwr("list", "link")["runs"][0]["run-id"]),
        )
        key, self.where = load_private(project.node(client) / "key"), f"127.0.0.1:{up.port}"
        self.authority = (project.server / "ca.pem").read_bytes()
        self.signs = NodeAuthHttpInterceptor(key, key.public_key())

    @contextmanager
    def connected(self) -> Iterator[FleetHttpClient]:
        with FleetHttpClient.from_server_address(
            self.where, False, self.authority, interceptors=[self.signs]
        ) as client:
            yield client

    def send(self, content: RecordDict, source: int, target: int, kind: str = "train") -> bool:
        """A message that replies to nothing, with a source of one's own choice."""
        about = Metadata(self.run, "", source, target, "", "", time.time(), 300.0, kind)
        message = Message(metadata=about, content=content)  # type: ignore[call-overload]
        message.metadata.__dict__["_message_id"] = message.object_id
        sent = PushMessagesRequest(
            node=self.node,
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )
        with self.connected() as fleet:
            said = fleet.PushMessages(sent)
            for name, part in get_all_nested_objects(message).items():
                if name in said.objects_to_push:
                    piece = {
                        "object_id": name,
                        "object_content": part.deflate(),
                        "session_id": said.session_id,
                    }
                    fleet.PushObject(PushObjectRequest(node=self.node, run_id=self.run, **piece))
        return bool(said.objects_to_push)


FORGER = """
import hashlib, json
from flwr.supernode.fleet_http_client import FleetHttpClient
announce = FleetHttpClient.PushMessages
def forge(self, request):
    own = request.node.node_id
    numbers = [int(node) for node in json.loads((server / 'registered.json').read_text()).values() if node]
    letter = request.messages_list[0].metadata.reply_to_message_id
    for other in [number for number in numbers if number != own]:
        for source, target, answered in ((1, other, ''), (own, other, ''), (other, 1, ''), (other, 1, letter)):
            forged = type(request)()
            forged.CopyFrom(request)
            about, tree = forged.messages_list[0].metadata, forged.message_object_trees[0]
            about.src_node_id, about.dst_node_id, about.reply_to_message_id = source, target, answered
            about.message_id = tree.object_id = hashlib.sha256(os.urandom(8)).hexdigest()
            del tree.children[:]
            try:
                announce(self, forged)
                said = 'taken'
            except Exception as error:
                said = str(error)
            with open(here / 'forged', 'a') as file:
                file.write(said + '\\\\n')
    return announce(self, request)
FleetHttpClient.PushMessages = forge
""".replace("\\\\n", "\\n")  # noqa: E501


def test_forged_messages_give_no_orders_get_no_client_banned_and_are_held_against_their_sender(
    tmp_path: Path,
) -> None:
    """A node with a key forges through the proxy, in every exchange; and past it, at the SuperLink itself: to
    the server in the names of others, and orders to other nodes in the server's name. `strikes` 0: it is
    never banned, so its own replies count and the run is the simulator's, bit by bit."""
    project = found(tmp_path, clients=3, rounds=8, strikes=0, quorum=1.0, wait=PATIENT)
    up, accepted = RunningFederation(project, lambda line: attack(line)), []

    def attack(line: str) -> None:
        if line.startswith("round 1:") and not accepted:
            attacker = Attacker(up, project, client=1)
            for victim in (0, 2):
                for number in range(3):
                    junk = RecordDict({"post": ConfigRecord({"nonce": f"{number}"})})
                    accepted.append(attacker.send(junk, source=1, target=1, kind="train"))
                accepted.append(attacker.send(forged_order(), source=1, target=attacker.nodes[victim]))

    up.processes.extra["node1"] = corrupt(project, 1, FORGER)
    with up:
        up.run(timeout=PATIENT)
    assert not up.processes.alive()
    assert len(accepted) == 8 and all(accepted), (
        "the SuperLink itself takes all of it: else this test shows nothing"
    )
    answers = (project.path / "cheat1" / "forged").read_text().splitlines()
    assert len(answers) >= 16 and all("403" in line for line in answers)
    ledger = project.ledger()
    struck = [
        (entry.client, entry.round, entry.what["offence"], entry.what["by"]) for entry in ledger.of("strike")
    ]
    assert {(1, 1, "name", "proxy"), (1, 1, "order", "proxy")} <= set(struck)
    assert {(client, by) for client, _, _, by in struck} == {(1, "proxy")} and len(set(struck)) == len(struck)
    assert ledger.of("ban", "missing") == []
    assert [entry.what["took_part"] for entry in ledger.of("round")] == [[0, 1, 2]] * 8
    assert torch.equal(model_of(project.run), model_of(simulated(project, tmp_path / "sim")))
    for victim in (0, 2):
        assert not (project.node(victim) / "state" / "x").exists()
        logs = "".join(file.read_text(errors="replace") for file in project.logs.glob(f"*{victim}.log"))
        assert "rejected an order without a complete envelope" in logs


def forged_order() -> RecordDict:
    order = {"run": "x", "task": "train", "round": 2, "step": 0, "committed": 1, "threads": 1, "world": "w"}
    header = ConfigRecord({**order, "discard_state": False, "pick": [-1]})
    return RecordDict({"header": header, "post": ConfigRecord({"nonce": "0" * 32})})


BOMB = """
import json
import os
from flwr.app import Array
deflate = Array.deflate
def many(self):
    content = deflate(self)
    head, _, body = content.partition(b'\\0')
    about = json.loads(body)
    if len(self.data) > 1000:
        about['arraychunk_ids'] = [0] * 2_000
    body = json.dumps(about).encode()
    kind, children, _ = head.decode().split(' ')
    return f'{kind} {children} {len(body)}'.encode() + b'\\0' + body
def change(reply, request):
    if asked(request)[0] == 'train':
        Array.deflate = many
        reply.content['fields']['update'] = Array(np.random.rand(500_000).astype(np.float32))
    return reply
lie(change)
"""


LYING = """a = fields['update']
fields['update'] = Array(dtype='float32', shape=(3,), stype=a.stype, data=a.data[:200])"""


def test_replies_that_are_malformed_or_would_fill_the_memory_are_struck_and_their_senders_banned(
    tmp_path: Path,
) -> None:
    """Client 5 sends 2 MB that name one chunk 2,000 times: 4 GB. The signatures of the senders are on all of
    it."""
    project = found(tmp_path, clients=6, rounds=2, strikes=1, quorum=1.0, wait=PATIENT)
    up, peaks = RunningFederation(project, lambda line: None), [0]
    cheats = {
        1: "fields['update'] = Array(np.full_like(fields['update'].numpy(), np.nan))",
        2: "fields['update'] = Array(np.zeros(7, dtype=np.float32))",
        3: LYING,
        4: "content['more'] = ConfigRecord({'x': 1})",
    }
    up.processes.extra |= {f"node{client}": cheating(up, client, code) for client, code in cheats.items()}
    up.processes.extra["node5"] = corrupt(project, 5, BOMB)
    report = up._report

    def measure_and_report() -> None:
        peaks.append(peak_memory_of_the_server_app(up))
        report()

    up._report = measure_and_report  # type: ignore[method-assign]
    with up:
        up.run(timeout=PATIENT)
    assert not up.processes.alive()
    reasons = {entry.client: entry.what["reason"] for entry in project.ledger().of("strike")}
    words = {1: "not finite", 2: "shape (7,)", 3: "bytes", 4: "records", 5: "its task allows"}
    assert reasons.keys() == words.keys() and all(words[client] in reasons[client] for client in words), (
        reasons
    )
    assert Enrolment.of(project.ledger().entries).banned.keys() == words.keys()
    assert [entry.what["ids"] for entry in project.ledger().of("round")] == [[0]] * 2
    assert 0 < max(peaks) < 1_500_000, f"the ServerApp has taken {max(peaks)} kB"


def cheating(up: RunningFederation, client: int, code: str) -> dict[str, str]:
    """The environment of a node whose ClientApp changes what it sends by `code`."""
    path = os.pathsep.join([cheat(up.project, client, code), up.processes.environment()["PYTHONPATH"]])
    return {"PYTHONPATH": path}


def peak_memory_of_the_server_app(up: RunningFederation) -> int:
    """In kB; 0 if there is none."""
    peaks = [
        int(line.split()[1])
        for pid in up.processes.alive()
        if b"flwr-serverapp" in _read(f"/proc/{pid}/cmdline")
        for line in _read(f"/proc/{pid}/status").decode().splitlines()
        if line.startswith("VmHWM")
    ]
    return max(peaks, default=0)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
