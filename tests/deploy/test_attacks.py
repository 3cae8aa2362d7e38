"""Attacks of a node with a valid key on a federation of real processes. The proxy refuses most of this; here
the attacker stands behind it, on the SuperLink's own port, and still reaches nobody. Threats and tests are
listed in docs/federation.md."""

from __future__ import annotations

import json
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

from holdfast.deploy.enrolment import fingerprint_of  # noqa: E402
from holdfast.deploy.keys import load_private  # noqa: E402
from holdfast.deploy.project import Project  # noqa: E402
from holdfast.deploy.up import RunningFederation  # noqa: E402
from tests.deploy.hostile_node import corrupt  # noqa: E402
from tests.deploy.real_federation import PATIENT, found, model_of, run_federation, simulated  # noqa: E402

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


def test_an_attacker_with_a_key_gives_no_orders_and_gets_nobody_banned(tmp_path: Path) -> None:
    """Messages to the server in the names of others, as many as there are strikes; and orders to another
    node, in the server's name."""
    project = found(tmp_path, clients=3, rounds=3, quorum=1.0, wait=PATIENT, strikes=1)
    taken: list[bool] = []

    def attack(up: RunningFederation, line: str) -> None:
        if line.startswith("round 1:") and not taken:
            attacker = Attacker(up, project, client=1)
            for victim in (0, 2):
                for number in range(3):
                    junk = RecordDict({"post": ConfigRecord({"nonce": f"{number}"})})
                    taken.append(attacker.send(junk, source=1, target=1, kind="train"))
                order = {
                    "run": "x",
                    "task": "train",
                    "round": 2,
                    "step": 0,
                    "discard_state": False,
                    "committed": 1,
                    "threads": 1,
                    "world": "w",
                }
                forged = RecordDict(
                    {
                        "header": ConfigRecord({**order, "pick": [-1]}),
                        "post": ConfigRecord({"nonce": "0" * 32}),
                    }
                )
                taken.append(attacker.send(forged, source=1, target=attacker.nodes[victim]))

    run_federation(project, disturb=attack)
    assert len(taken) == 8 and all(taken), (
        "the SuperLink itself takes all of it: else this test shows nothing"
    )
    ledger = project.ledger()
    assert ledger.of("strike", "ban", "missing") == []
    assert [entry.what["took_part"] for entry in ledger.of("round")] == [[0, 1, 2]] * 3
    assert torch.equal(model_of(project.run), model_of(simulated(project, tmp_path / "sim")))
    for victim in (0, 2):
        assert not (project.node(victim) / "state" / "x").exists()
        logs = "".join(file.read_text(errors="replace") for file in project.logs.glob(f"*{victim}.log"))
        assert "rejected an order without a complete envelope" in logs


BOMB = """
import json
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


def test_a_reply_that_would_fill_the_servers_memory_is_refused_and_its_sender_is_struck(
    tmp_path: Path,
) -> None:
    """2 MB that name one chunk 2,000 times: 4 GB. The sender's signature is on it."""
    project = found(tmp_path, clients=3, rounds=2, strikes=2, quorum=1.0, wait=PATIENT)
    up, most = RunningFederation(project, lambda line: None), [0]
    up.processes.extra["node1"] = corrupt(project, 1, BOMB)
    watched = up._tell

    def tell() -> None:
        for pid in up.processes.alive():
            if b"flwr-serverapp" in _read(f"/proc/{pid}/cmdline"):
                peak = [
                    line
                    for line in _read(f"/proc/{pid}/status").decode().splitlines()
                    if line.startswith("VmHWM")
                ]
                most[0] = max([most[0], *(int(line.split()[1]) for line in peak)])
        watched()

    up._tell = tell  # type: ignore[method-assign]
    with up:
        up.run(timeout=PATIENT)
    strikes = [(entry.client, entry.what["reason"]) for entry in project.ledger().of("strike")]
    assert [client for client, _ in strikes] == [1, 1] and all(
        "its task allows" in reason for _, reason in strikes
    ), strikes
    assert [entry.client for entry in project.ledger().of("ban")] == [1]
    assert [entry.what["ids"] for entry in project.ledger().of("round")] == [[0, 2]] * 2
    assert 0 < most[0] < 1_500_000, f"the ServerApp has taken {most[0]} kB"


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
