"""The connection of a node, against a small SuperLink behind the transport of Flower's own client. A new
Flower that changes the client fails here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict  # noqa: E402
from flwr.app.message import remove_content_from_message  # noqa: E402
from flwr.common.serde import message_to_proto  # noqa: E402
from flwr.proto.fleet_pb2 import (  # noqa: E402
    ActivateNodeResponse,
    DeactivateNodeResponse,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse  # noqa: E402
from flwr.proto.message_pb2 import (  # noqa: E402
    ConfirmMessageReceivedResponse,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.supercore.inflatable.inflatable_object import (  # noqa: E402
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)

from holdfast.core.errors import RunError  # noqa: E402
from holdfast.deploy import fleet_connection  # noqa: E402
from holdfast.deploy.fleet_connection import FleetConnection, Lost, RunEnded  # noqa: E402
from holdfast.deploy.messaging import answer  # noqa: E402
from holdfast.deploy.supernode import Pause, serve  # noqa: E402
from tests.deploy.local_grid import be_server  # noqa: E402


class Link:
    """A SuperLink with one message after the other. `fails` has errors for the next calls of a path."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.fetched: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.orders: list[Message] = []
        self.replies: list[Any] = []
        self.pushed: dict[str, bytes] = {}
        self.fails: dict[str, list[Any]] = {}

    def post(self, content: RecordDict) -> Message:
        order = Message(content, 7, "train")
        order.metadata.__dict__["_message_id"] = order.object_id
        self.objects |= {name: part.deflate() for name, part in get_all_nested_objects(order).items()}
        self.orders.append(order)
        return order

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.rpartition("/")[2]
        self.calls[path] += 1
        if waiting := self.fails.get(path):
            failure = waiting.pop(0)
            if isinstance(failure, Exception):
                raise failure
            return httpx.Response(failure)
        body = request.read()
        return httpx.Response(200, content=getattr(self, path.replace("-", "_"))(body).SerializeToString())

    def activate_node(self, _: bytes) -> Any:
        return ActivateNodeResponse(node_id=7)

    def deactivate_node(self, _: bytes) -> Any:
        return DeactivateNodeResponse()

    def send_node_heartbeat(self, _: bytes) -> Any:
        return SendNodeHeartbeatResponse(success=True)

    def pull_messages(self, _: bytes) -> Any:
        if not self.orders:
            return PullMessagesResponse()
        order = self.orders.pop(0)
        proto = message_to_proto(remove_content_from_message(order))
        return PullMessagesResponse(messages_list=[proto], message_object_trees=[get_object_tree(order)])

    def pull_object(self, body: bytes) -> Any:
        name = PullObjectRequest.FromString(body).object_id
        self.fetched.append(name)
        return PullObjectResponse(object_found=True, object_available=True, object_content=self.objects[name])

    def confirm_message_received(self, _: bytes) -> Any:
        return ConfirmMessageReceivedResponse()

    def push_messages(self, body: bytes) -> Any:
        request = PushMessagesRequest.FromString(body)
        self.replies.append(request)
        wanted = {one.object_id for one in iterate_object_tree(request.message_object_trees[0])}
        return PushMessagesResponse(objects_to_push=wanted, session_id="s")

    def push_object(self, body: bytes) -> Any:
        request = PushObjectRequest.FromString(body)
        assert request.session_id == "s"
        self.pushed[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Link:
    made, client = Link(), httpx.Client
    be_server()
    monkeypatch.setenv("HOLDFAST_ALIVE", str(tmp_path / "node7"))
    monkeypatch.setattr(
        httpx, "Client", lambda **options: client(transport=httpx.MockTransport(made), timeout=5)
    )
    monkeypatch.setattr(fleet_connection.time, "sleep", lambda _: None)
    return made


def connect() -> FleetConnection:
    return FleetConnection("127.0.0.1:1", None, ec.generate_private_key(ec.SECP384R1()))


def model(**more: Any) -> RecordDict:
    bank = ArrayRecord({"bank": Array(np.arange(1000.0))})
    return RecordDict({"bank": bank, "post": ConfigRecord({"nonce": "n", **more})})


def take(node: FleetConnection) -> Message:
    taken = node.pull()
    assert taken is not None
    return node.fetch(*taken)


def test_a_message_is_fetched_and_its_reply_arrives_as_flower_writes_it(link: Link) -> None:
    order = link.post(model())
    with connect() as node:
        message = take(node)
        assert message.content["bank"]["bank"].data == order.content["bank"]["bank"].data
        assert node.pull() is None
        node.send(answer(RecordDict({"a": ConfigRecord({"x": 1})}), message), 1.5)
    (sent,) = link.replies
    about = sent.messages_list[0].metadata
    assert about.reply_to_message_id == order.metadata.message_id and sent.node.node_id == 7
    assert list(sent.clientapp_runtime_list) == [1.5] and not sent.messages_list[0].content.ByteSize()
    assert about.message_id == sent.message_object_trees[0].object_id and about.message_id in link.pushed
    assert link.calls["confirm-message-received"] == link.calls["deactivate-node"] == 1


def test_a_model_that_the_last_message_had_is_not_fetched_again(link: Link) -> None:
    with connect() as node:
        link.post(model())
        first = take(node)
        fetched = len(link.fetched)
        link.post(model(round=2))
        second = take(node)
        assert second.content["bank"]["bank"].data == first.content["bank"]["bank"].data
        assert not set(link.fetched[fetched:]) & set(link.fetched[:fetched])
        assert max(len(link.objects[name]) for name in link.fetched[fetched:]) < 1000
        link.post(RecordDict({"post": ConfigRecord({})}))
        take(node)
        assert sum(map(len, node.kept.values())) < 1000, "only the last message is kept"


def test_an_object_that_is_not_its_digests_is_refused(link: Link) -> None:
    order = link.post(model())
    link.objects[order.content["post"].object_id] = ConfigRecord({"nonce": "other"}).deflate()
    with connect() as node, pytest.raises(ValueError, match="not its digest's"):
        take(node)


def test_a_server_that_is_away_is_waited_for_once_it_was_reached(link: Link, tmp_path: Path) -> None:
    tls = httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol")
    link.fails = {"activate-node": [tls]}
    with pytest.raises(RunError, match="does not accept this node: .SSL"):  # it may be the wrong server
        connect().__enter__()
    away: list[bool] = []

    def look(_: float) -> None:
        away.append((tmp_path / "node7.away").exists())

    link.fails = {"activate-node": [httpx.ConnectError("refused")]}
    with pytest.MonkeyPatch.context() as patch, connect() as node:
        patch.setattr(fleet_connection.time, "sleep", look)
        link.fails = {"pull-messages": [tls, httpx.ReadTimeout("slow"), 502, 503, 504]}
        assert node.pull() is None and away == [True] * 5
        assert not (tmp_path / "node7.away").exists()
        link.fails = {"pull-messages": [500] * 5}  # a locked database
        assert node.pull() is None
        link.fails = {"pull-messages": [500] * 50}
        with pytest.raises(httpx.HTTPStatusError):
            node.pull()


@pytest.mark.parametrize(("code", "error"), [(401, Lost), (403, RunEnded), (409, httpx.HTTPStatusError)])
def test_a_refusal_is_not_tried_again(code: int, error: type[Exception], link: Link) -> None:
    with connect() as node:
        link.fails = {"pull-messages": [code, code]}
        with pytest.raises(error):
            node.pull()
        assert link.calls["pull-messages"] == 1


class Enough(Exception):
    pass


def run(link: Link, behaviour: Callable[[Message], Message], monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve until there is no message."""
    monkeypatch.setattr("holdfast.deploy.supernode.app", lambda message, _: behaviour(message))

    def sleep(_: float) -> None:
        raise Enough

    with connect() as node, pytest.raises(Enough):
        serve(node, {"config": "x"}, sleep)


def test_one_message_after_the_other_is_answered_and_an_error_ends_nothing(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second cannot be fetched, the third raises an error here, and the server is told."""
    for number in range(4):
        link.post(model(number=number))
    link.objects[link.orders[1].content["post"].object_id] = b"ConfigRecord  0\x00"

    def behave(message: Message) -> Message:
        if message.content["post"]["number"] == 2:
            raise ValueError("no data")
        return answer(RecordDict(), message)

    run(link, behave, monkeypatch)
    errors = [reply.messages_list[0].error for reply in link.replies]
    assert [error.code for error in errors] == [0, 2, 0]
    assert errors[1].reason == "<class 'ValueError'>:<'no data'>"


def test_nothing_of_the_servers_app_is_asked_for(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    link.post(model())
    run(link, lambda message: answer(RecordDict(), message), monkeypatch)
    assert not link.calls["get-fab"] and not link.calls["get-run"] and len(link.replies) == 1


def test_questions_that_are_answered_at_once_become_seldom_and_held_ones_do_not() -> None:
    pause = Pause()
    assert [pause.after(0.0) for _ in range(7)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert pause.after(10.0) == 0.0 and pause.after(0.1) == 0.05


def test_a_heartbeat_that_fails_is_tried_again_soon_and_one_that_is_refused_ends_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, waited, left = iter([True, False, False, False, False, False, False, True]), [], []
    beating = fleet_connection.Heartbeat(lambda: next(said))

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return False

    monkeypatch.setattr(beating.stopped, "wait", wait)
    monkeypatch.setattr(fleet_connection, "leave", lambda code, line: left.append((code, line)))
    monkeypatch.setattr(fleet_connection.random, "uniform", lambda low, high: high)
    beating._run()  # until nothing is left to say, which is an error
    usual = 0.75 * (fleet_connection.HEARTBEAT_DEFAULT_INTERVAL - fleet_connection.HEARTBEAT_CALL_TIMEOUT)
    assert waited == [usual, 2, 4, 8, 16, 20, 20, usual]
    assert left == [(fleet_connection.LOST, "the heartbeat has stopped; this node exits")]
