"""The proxy without sockets: what it forwards, each node's share of a round and of the memory, and what
becomes of what it refuses."""

from __future__ import annotations

import asyncio
import json
import ssl
import string
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import ConfigRecord, Message, RecordDict  # noqa: E402
from flwr.common.serde import message_to_proto  # noqa: E402
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest  # noqa: E402
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest  # noqa: E402
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest  # noqa: E402
from flwr.proto.node_pb2 import Node  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import get_object_tree  # noqa: E402

from holdfast.deploy.admission import KeyedAdmission  # noqa: E402
from holdfast.deploy.enrolment import Enrolment  # noqa: E402
from holdfast.deploy.fleet_rules import ANNOUNCE, PULL, PUSH, Refused, Rules  # noqa: E402
from holdfast.deploy.messaging import Messaging  # noqa: E402
from holdfast.deploy.processes import free_port  # noqa: E402
from holdfast.deploy.project import Project, init  # noqa: E402
from holdfast.deploy.proxy import Proxy, Quota  # noqa: E402
from holdfast.deploy.proxy_keys import Keys  # noqa: E402
from holdfast.deploy.proxy_keys import Node as Known
from holdfast.deploy.refusals import ProxyStrikes, Refusals  # noqa: E402
from tests.deploy.fleet_senders import SESSION, Sender, object_id, register  # noqa: E402
from tests.deploy.local_grid import be_server  # noqa: E402

HEARTBEAT = "/v1/fleet/send-node-heartbeat"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = init(tmp_path / "ward", 2, port=free_port())
    register(made, 0, 1)
    return made


def make(
    project: Project, answer: Callable[[httpx.Request], httpx.Response], largest: int = 10**6, **parts: Any
) -> Proxy:
    proxy = Proxy(
        "https://127.0.0.1:1",
        ssl.create_default_context(),
        Keys(project.server / "registered.json"),
        Rules(largest, 100),
        **parts,
    )

    def streamed(request: httpx.Request) -> httpx.Response:
        reply = answer(request)
        return httpx.Response(
            reply.status_code, headers=reply.headers, stream=httpx.ByteStream(reply.content)
        )

    proxy.client = httpx.AsyncClient(transport=httpx.MockTransport(streamed))
    return proxy


def ask(
    proxy: Proxy, path: str, content: bytes = b"", method: str = "POST", **headers: str
) -> httpx.Response:
    async def go() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=proxy), base_url="http://proxy"
        ) as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(go())


def piece(sender: Sender, size: int) -> bytes:
    """A request that pushes an object, of so many bytes."""
    request = PushObjectRequest(
        node=Node(node_id=sender.number), run_id=7, object_id=object_id("x"), session_id=SESSION
    )
    request.object_content = b"x" * (size - len(request.SerializeToString()) - 3)
    body = request.SerializeToString()
    assert len(body) == size
    return body


def beat(sender: Sender) -> bytes:
    return SendNodeHeartbeatRequest(
        node=Node(node_id=sender.number), heartbeat_interval=30
    ).SerializeToString()


def test_what_a_node_may_ask_is_forwarded_as_it_is_and_nothing_else(project: Project) -> None:
    seen: list[httpx.Request] = []

    def upstream(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(201, content=b"pong " + request.content, headers={"x-flower": "1"})

    proxy, sender = make(project, upstream), Sender(project, 0)
    reply = ask(proxy, HEARTBEAT, beat(sender), **sender.headers(), authorization="mine", connection="x")
    assert (reply.status_code, reply.content, reply.headers["x-flower"]) == (
        201,
        b"pong " + beat(sender),
        "1",
    )
    assert str(seen[0].url) == f"https://127.0.0.1:1{HEARTBEAT}" and seen[0].content == beat(sender)
    assert {name: seen[0].headers[name] for name in ("flwr-public-key", "flwr-signature")}.items() <= dict(
        reply.request.headers
    ).items()
    assert "authorization" not in seen[0].headers
    for path in (
        "/v1/control/register",
        "/v1/runtime/x",
        "/",
        "/v1/fleet",
        "/v1/fleet/../control/x",
        "/v1/fleet/%2e%2e/control/x",
        "/v1//fleet/x",
    ):
        assert (
            ask(proxy, path, **sender.headers()).status_code == ask(proxy, path + "?").status_code == 403
        ), path
    for wrong in (
        {},
        {**sender.headers(), "flwr-signature": "x"},
        {**sender.headers(), "flwr-timestamp": "now"},
    ):
        assert ask(proxy, HEARTBEAT, beat(sender), **wrong).status_code == 401
    assert ask(proxy, HEARTBEAT, beat(sender), method="GET", **sender.headers()).status_code == 403
    assert (
        ask(proxy, HEARTBEAT, beat(Sender(project, 1)), **sender.headers()).status_code == 403
    )  # another node's sign of life
    assert len(seen) == 1


def test_half_a_request_is_not_forwarded_and_an_unreachable_superlink_is_reported(project: Project) -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("gone")

    proxy, sender = make(project, gone), Sender(project, 0)
    assert ask(proxy, HEARTBEAT, beat(sender), **sender.headers()).status_code == 502
    headers = [
        (name.encode(), value.encode())
        for name, value in {**sender.headers(), "content-length": "900"}.items()
    ]
    scope = {"type": "http", "method": "POST", "path": PUSH, "query_string": b"", "headers": headers}
    parts = [{"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"}]
    said: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return parts.pop(0)

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    asyncio.run(proxy(scope, receive, send))
    assert said == [] and parts == []


def test_one_node_has_two_of_the_places_for_large_bodies(project: Project) -> None:
    proxy, nodes, waiting = (
        make(project, lambda request: httpx.Response(200)),
        [Sender(project, 0), Sender(project, 1)],
        [0, 0],
    )

    def scope(client: int, length: int, path: str = PUSH) -> dict[str, Any]:
        headers = [
            (name.encode(), value.encode())
            for name, value in {**nodes[client].headers(), "content-length": str(length)}.items()
        ]
        return {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}

    async def go() -> list[int]:
        said: list[int] = []

        async def send(message: dict[str, Any]) -> None:
            said.extend([message["status"]] if "status" in message else [])

        def silent(client: int) -> Any:
            async def receive() -> dict[str, Any]:
                waiting[client] += 1
                return await asyncio.Event().wait()  # type: ignore[return-value]

            return proxy(scope(client, 900_000), receive, send)

        async def at_once() -> dict[str, Any]:
            return {"type": "http.request", "body": beat(nodes[0])}

        slow = [asyncio.create_task(silent(client)) for client in (0, 0, 0, 0, 1)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert waiting == [2, 1]  # the other bodies of node 0 are not even looked at
        await proxy(scope(0, len(beat(nodes[0])), HEARTBEAT), at_once, send)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return said

    assert asyncio.run(go()) == [200]


def test_a_node_has_a_share_of_every_round_and_cannot_use_up_anothers(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """However its key is spelled: the last letter of base64 has bits that nobody reads. The quota is no
    offence."""
    head, file = project.server / "head.json", project.server / "refusals.jsonl"
    proxy = make(
        project, lambda _: httpx.Response(200), quota=Quota(1500, head), refusals=Refusals(file, head)
    )
    a, b = Sender(project, 0), Sender(project, 1)

    def push(sender: Sender, size: int, spelled: int = 0) -> int:
        headers, alphabet = (
            sender.headers(),
            string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/",
        )
        key = headers["flwr-public-key"]
        assert key[-1] == "=" != key[-2]
        headers["flwr-public-key"] = key[:-2] + alphabet[alphabet.index(key[-2]) + spelled] + "="
        return ask(proxy, PUSH, piece(sender, size), **headers).status_code

    assert [push(a, 900), push(a, 600, 1), push(a, 300, 2), push(a, 300, 3)] == [200, 200, 413, 413]
    assert capsys.readouterr().err.count("federation.quota") == 1
    assert (
        ask(proxy, HEARTBEAT, beat(a), **a.headers()).status_code == 200
    )  # a node that has sent too much is still there
    assert [push(b, 1000), push(b, 500)] == [200, 200]
    head.write_text(json.dumps({"round": 1}))  # a round is committed
    assert push(a, 1000) == push(b, 1000) == 200
    assert [
        (json.loads(line)["kind"], json.loads(line)["strike"]) for line in file.read_text().splitlines()
    ] == [("quota", False)]


# ---- rules


def test_a_reply_as_flower_writes_it_is_taken() -> None:
    """A real message with real objects, among them the same one twice; and an error."""
    be_server()
    message = Message(RecordDict({"post": ConfigRecord({"nonce": "x"})}), 1000, "train", ttl=60)
    message.metadata.__dict__["_message_id"] = object_id("letter")
    node = Known("f" * 64, 1000, b"", None)  # type: ignore[arg-type]
    rules = Rules(10**6, 100)
    rules.take_note(
        PULL, None, PullMessagesResponse(messages_list=[message_to_proto(message)]).SerializeToString(), node
    )
    same = ConfigRecord({"x": 1})
    reply = Message(RecordDict({"a": same, "b": same, "post": message.content["post"]}), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    tree = get_object_tree(reply)
    proto = message_to_proto(reply)
    proto.content.Clear()
    body = PushMessagesRequest(
        node=Node(node_id=1000),
        messages_list=[proto],
        message_object_trees=[tree],
        clientapp_runtime_list=[0.1],
    )
    for _ in range(4):  # a receipt may be lost
        rules.take_note(ANNOUNCE, rules.check(ANNOUNCE, body.SerializeToString(), node), b"", node)
    with pytest.raises(Refused, match="more than once") as again:
        rules.check(ANNOUNCE, body.SerializeToString(), node)
    assert not again.value.offence


def chain(depth: int) -> ObjectTree:
    tree = ObjectTree(object_id=object_id(0))
    for level in range(1, depth):
        tree = ObjectTree(object_id=object_id(level), children=[tree])
    return tree


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (chain(11), "nested too deeply"),
        (chain(90), "nested too deeply"),
        (ObjectTree(object_id=object_id(0), children=[chain(1), chain(1)]), "one object twice"),
        (ObjectTree(object_id=object_id(1), children=[ObjectTree(object_id="g" * 64)]), "without an id"),
        (
            ObjectTree(
                object_id=object_id(1), children=[ObjectTree(object_id=object_id(i)) for i in range(1100)]
            ),
            "more than 100 objects",
        ),
    ],
)
def test_a_tree_of_objects_that_flower_never_makes_is_refused(
    tree: ObjectTree, words: str, project: Project
) -> None:
    sender = Sender(project, 0)
    request = sender.reply(message_id=tree.object_id)
    request.message_object_trees[0].CopyFrom(tree)
    with pytest.raises(Refused, match=words) as no:
        Rules(10**6, 100).check(
            ANNOUNCE, request.SerializeToString(), Known("f" * 64, sender.number, b"", None)
        )  # type: ignore[arg-type]
    assert no.value.offence == ("more than" in words)


def test_a_node_may_answer_at_most_two_messages_that_the_proxy_has_not_seen(project: Project) -> None:
    """A proxy that was started again has not seen the last ones; after that, and not in the name of another
    key, nothing is taken."""
    sender, rules = Sender(project, 0), Rules(10**6, 100)
    node = Known("f" * 64, sender.number, b"", None)  # type: ignore[arg-type]
    for word in ("one", "two"):
        rules.check(ANNOUNCE, sender.reply(reply_to_message_id=object_id(word)).SerializeToString(), node)
    with pytest.raises(Refused, match="was not sent"):
        rules.check(ANNOUNCE, sender.reply(reply_to_message_id=object_id("three")).SerializeToString(), node)


def test_sizes_are_checked_before_anything_is_read() -> None:
    rules = Rules(10**6, 1000)
    for path, size, offence in (
        (ANNOUNCE, 3_400_000, True),
        (PUSH, 17_000_000, True),
        (PUSH, 1_000_001, False),
        (PULL, 20_000, False),
    ):
        with pytest.raises(Refused) as no:
            rules.check_size(path, size)
        assert (no.value.status, no.value.offence) == (413, offence)
    rules.check_size(ANNOUNCE, 1000 * 72)
    Rules(10, 1000).check_size(HEARTBEAT, 100)  # what keeps a node alive is never too large


# ---- what becomes of an offence


def test_an_offence_is_a_strike_once_in_a_round_and_three_are_a_ban(project: Project) -> None:
    ledger, head, file = project.ledger(), project.server / "head.json", project.server / "refusals.jsonl"
    ledger.append("start")
    noted, names = (
        Refusals(file, head),
        {c: Enrolment.of(ledger.entries).members[c].fingerprint for c in range(2)},
    )
    reader = ProxyStrikes(file)
    reader.add_to(ledger)
    for _ in range(3):
        noted.record(
            names[1], "name", "sent a message in the name of node 7", "/v1/fleet/push-messages\x1b[31m", True
        )
    noted.record(names[1], "order", "sent a message that is not a reply", ANNOUNCE, True)
    noted.record(names[0], "quota", "has sent all", PUSH, False)
    noted.record("0" * 64, "name", "nobody", PUSH, True)
    with open(file, "a") as torn:
        torn.write("no json\n[]\n{}\n" + '{"half')
    reader.add_to(ledger)
    strikes = [
        (entry.client, entry.round, entry.what["offence"], entry.what["by"]) for entry in ledger.of("strike")
    ]
    assert strikes == [(1, 1, "name", "proxy"), (1, 1, "order", "proxy")]
    assert "\x1b" not in file.read_text()
    reader.add_to(ledger)
    ProxyStrikes(file).add_to(project.ledger())  # `up` is started again
    Refusals(file, head).record(names[1], "name", "again", PUSH, True)  # and so is the proxy
    with open(file, "a") as more:
        more.write("\n")
    reader.add_to(ledger)
    assert len(ledger.of("strike")) == 2
    admission = KeyedAdmission(Messaging(None), 2, ledger, strikes=3)  # type: ignore[arg-type]
    header: Any = SimpleNamespace(run="r", round=2, task="train", step=0)
    admission.record_exchange(header, {}, {})
    assert ledger.of("ban") == []
    head.write_text(json.dumps({"round": 1}))
    noted.record(names[1], "name", "sent a message in the name of node 8", PUSH, True)
    reader.add_to(ledger)
    admission.record_exchange(header, {}, {})
    (ban,) = ledger.of("ban")
    assert ban.client == 1 and ban.what["by"] == "strikes" and "in the name of node 8" in ban.what["reason"]


def test_the_file_of_refusals_does_not_grow_for_ever(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.deploy.refusals._FULL", 1000)
    file, ledger = project.server / "refusals.jsonl", project.ledger()
    noted, reader = Refusals(file, None), ProxyStrikes(file)
    fingerprint = Enrolment.of(ledger.entries).members[0].fingerprint
    for number in range(40):
        noted.record(fingerprint, f"kind {number}", "x", PUSH, True)
        reader.add_to(ledger)
    assert file.stat().st_size < 2000 and (project.server / "refusals.old.jsonl").stat().st_size < 2000
    assert len(ledger.of("strike")) == 40
