"""The real proxy, with TLS, in front of a tiny SuperLink: strangers that say nothing or speak slowly, nodes
that say what they may not."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.proto.fleet_pb2 import PullMessagesRequest, RegisterNodeFleetRequest  # noqa: E402
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest  # noqa: E402
from flwr.proto.node_pb2 import Node  # noqa: E402

from holdfast.core.reading import parse_json  # noqa: E402
from holdfast.deploy.keys import make_node_key  # noqa: E402
from holdfast.deploy.processes import free_port  # noqa: E402
from holdfast.deploy.project import Project, init  # noqa: E402
from tests.deploy.fleet_senders import (
    SESSION,
    Sender,
    TinyLink,
    object_id,
    proxy_process,
    register,
)  # noqa: E402

QUICK = {"handshake": 1.5, "header": 1.5, "grace": 1.5, "body": 3, "rate": 100_000}
"""Seconds, so that a test can wait for them."""


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, TinyLink, str]]:
    project = init(tmp_path_factory.mktemp("proxy") / "ward", 3, port=free_port())
    register(project, 0, 1, 2)
    link = TinyLink(project)
    with proxy_process(project, link.address, **QUICK) as (address, _):
        yield project, link, address


def connect(address: str, project: Project | None = None) -> socket.socket:
    host, _, port = address.partition(":")
    plain = socket.create_connection((host, int(port)), timeout=10)
    if project is None:
        return plain
    return context(project).wrap_socket(plain, server_hostname=host)


@cache
def context(project: Project) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=project.server / "ca.pem")


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        while connection.recv(65536):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True


def answered_in(project: Project, address: str, client: int = 0) -> float:
    """Seconds until a node that has just come is answered."""
    began = time.monotonic()
    sender = Sender(project, client, address)
    assert len(sender.pull().messages_list) == 1
    return time.monotonic() - began


@pytest.mark.parametrize("tls", [False, True])
def test_silent_unauthenticated_connections_keep_no_node_out_and_are_closed(
    ward: tuple[Project, TinyLink, str], tls: bool
) -> None:
    """300 that say nothing; with TLS a third each says nothing, half a header, and a header letter by
    letter."""
    project, _, address = ward
    soon = 2 + 3 * answered_in(project, address)
    strangers = [connect(address, project if tls else None) for _ in range(300)]
    speaking = strangers if tls else []

    def say(some: list[socket.socket], words: bytes) -> None:
        for stranger in some:
            try:
                stranger.sendall(words)
            except OSError:  # closed, perhaps for a newer one
                pass

    say(speaking[1::3] + speaking[2::3], b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\nx:")
    assert answered_in(project, address) < soon
    for _ in range(10):
        say(speaking[2::3], b"x")
        time.sleep(0.2)
    assert all(is_closed(stranger) for stranger in strangers)


def test_an_unauthenticated_request_is_answered_before_its_body_is_read(
    ward: tuple[Project, TinyLink, str], tmp_path: Path
) -> None:
    """And so is one with a key that nobody registered, or with an old signature."""
    project, link, address = ward
    make_node_key(tmp_path, "stranger")
    before = len(link.seen)
    keys = [
        {},
        Sender(project, 0, folder=tmp_path).headers(),
        {**Sender(project, 0).headers(), "flwr-timestamp": "2020-01-01T00:00:00+00:00"},
    ]
    for headers in keys:
        for path, status in (
            ("push-object", 401),
            ("activate-node", 412),
            ("register-node", 412),
            ("../control/start-run", 403),
        ):
            with connect(address, project) as stranger:
                head = "".join(
                    f"{name}: {value}\r\n"
                    for name, value in {"host": "x", "content-length": "5000000", **headers}.items()
                )
                stranger.sendall(
                    f"POST {'/v1/fleet/' if '..' not in path else '/v1'}{path.strip('.')}"
                    f" HTTP/1.1\r\n{head}\r\n".encode()
                )
                stranger.settimeout(5)
                assert stranger.recv(1000).startswith(f"HTTP/1.1 {status} ".encode()), path
    assert len(link.seen) == before


def head_of(sender: Sender, path: str, length: int) -> bytes:
    lines = "".join(
        f"{name}: {value}\r\n"
        for name, value in {"host": "x", "content-length": str(length), **sender.headers()}.items()
    )
    return f"POST /v1/fleet/{path} HTTP/1.1\r\n{lines}\r\n".encode()


def test_a_node_that_sends_or_reads_slowly_does_not_delay_others(ward: tuple[Project, TinyLink, str]) -> None:
    """Six large bodies of one node that never come, and six replies that it never reads."""
    project, link, address = ward
    soon = 2 + 3 * answered_in(project, address)
    link.large = 20_000_000
    slow = Sender(project, 1, address)
    pull = PullObjectRequest(
        node=Node(node_id=slow.number), run_id=7, object_id=object_id("x")
    ).SerializeToString()
    bodies = [connect(address, project) for _ in range(6)]
    for body in bodies:
        body.sendall(head_of(slow, "push-object", 5_000_000))
    readers = [connect(address, project) for _ in range(6)]
    for reader in readers:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.sendall(head_of(slow, "pull-object", len(pull)) + pull)
    assert answered_in(project, address) < soon
    assert pushed(Sender(project, 0, address), 5_000_000) == 200  # a large body of another node finds a place
    assert [arrived(body) for body in bodies[:2]] == [0, 0]  # the others wait for these, and are then as slow
    time.sleep(2 * QUICK["grace"])
    assert all(arrived(reader) < 20_000_000 for reader in readers)
    link.large = 1000
    assert answered_in(project, address, 1) < soon  # nothing is left of it


def arrived(reader: socket.socket) -> int:
    """Bytes until the other side closed. It must be tired of waiting before anything is read."""
    count = 0
    reader.settimeout(20)
    try:
        while data := reader.recv(1 << 20):
            count += len(data)
    except TimeoutError:
        raise AssertionError("still open") from None
    except OSError:
        pass
    return count


def pushed(sender: Sender, size: int) -> int:
    content = PushObjectRequest(
        node=Node(node_id=sender.number),
        run_id=7,
        object_id=object_id("x"),
        session_id=SESSION,
        object_content=b"x" * size,
    )
    return sender.post("/v1/fleet/push-object", content.SerializeToString()).status_code


def test_connections_of_nodes_are_limited_per_node_and_do_not_count_as_unauthenticated(
    ward: tuple[Project, TinyLink, str],
) -> None:
    """Sixteen connections of each of three nodes at one address stay open beside 200 of strangers; the
    seventeenth ends a node's first."""
    project, _, address = ward
    pull = {c: Sender(project, c) for c in range(3)}
    held: dict[int, list[socket.socket]] = {0: [], 1: [], 2: []}

    def ask(connection: socket.socket, client: int) -> bytes:
        body = PullMessagesRequest(node=Node(node_id=pull[client].number)).SerializeToString()
        connection.sendall(head_of(pull[client], "pull-messages", len(body)) + body)
        return connection.recv(1000)

    for _ in range(16):
        for client, own in held.items():
            own.append(connect(address, project))
            assert ask(own[-1], client).startswith(b"HTTP/1.1 200")
    strangers = [connect(address, project) for _ in range(200)]
    assert all(
        ask(connection, client).startswith(b"HTTP/1.1 200")
        for client, own in held.items()
        for connection in own
    )
    more = connect(address, project)
    assert ask(more, 2).startswith(b"HTTP/1.1 200")
    assert [is_closed(connection) for connection in held[2]] == [True] + [False] * 15
    for connection in (*strangers, *held[0], *held[1], *held[2], more):
        connection.close()


def test_only_replies_of_the_sender_itself_are_forwarded(ward: tuple[Project, TinyLink, str]) -> None:
    project, link, address = ward
    sender = Sender(project, 2, address)
    path = "/v1/fleet/push-messages"
    sender.pull()
    before = len(link.seen)
    order = sender.reply(reply_to_message_id="", src_node_id=1, dst_node_id=Sender(project, 0).number)
    two = sender.reply()
    two.messages_list.extend(list(two.messages_list))
    wrong = {
        "as the server": (order, 403),
        "as another node": (sender.reply(src_node_id=Sender(project, 0).number), 403),
        "to nothing": (sender.reply(reply_to_message_id=""), 403),
        "to another node": (sender.reply(dst_node_id=Sender(project, 0).number), 403),
        "of another run": (sender.reply(run_id=8), 400),
        "two": (two, 400),
        "1,001 objects": (sender.reply(objects=1001), 413),
        "50,000 objects": (sender.reply(objects=50_000), 413),
        "of other objects": (sender.reply(message_id=object_id("else")), 400),
        "no id": (sender.reply(reply_to_message_id="../../etc"), 400),
    }
    for what, (request, status) in wrong.items():
        assert sender.post(path, request.SerializeToString()).status_code == status, what
    other = sender.reply()
    other.node.node_id = Sender(project, 0).number
    assert sender.post(path, other.SerializeToString()).status_code == 403
    assert sender.post(path, b"\xff\xff").status_code == 400
    register_self = RegisterNodeFleetRequest(public_key=b"x").SerializeToString()
    for forbidden in (
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
        "/v1/control/start-run",
        "/v1/fleet/push-messages?x=1",
    ):
        assert sender.post(forbidden, register_self).status_code == 403
    packed = httpx.post(
        f"https://{address}{path}",
        content=b"x",
        headers={**sender.headers(), "content-encoding": "gzip"},
        verify=sender.context,
    )
    assert packed.status_code == 411 and pushed(sender, 16_000_001) == 413
    assert len(link.seen) == before
    noted = [parse_json(line) for line in (project.server / "refusals.jsonl").read_text().splitlines()]
    strikes = {line["kind"]: line["strike"] for line in noted}
    assert strikes == {
        "name": True,
        "order": True,
        "objects": True,
        "object": True,
        "path": True,
        "form": False,
        "many": False,
    }
    assert len(noted) == len(strikes)  # each once in a round
    good = sender.reply(objects=1000).SerializeToString()
    assert sender.post(path, good).status_code == 200 and link.seen[-1] == (path, good)
    again = sender.reply(objects=2)
    again.messages_list[0].metadata.message_id = again.message_object_trees[0].object_id = object_id(
        "a second one"
    )
    assert sender.post(path, again.SerializeToString()).status_code == 409
    assert (
        sender.post(
            path, sender.reply(reply_to_message_id=object_id("a letter of before")).SerializeToString()
        ).status_code
        == 200
    )
    assert not parse_json((project.server / "refusals.jsonl").read_text().splitlines()[-1])["strike"]


@pytest.mark.slow
def test_a_key_is_accepted_only_while_it_is_registered(tmp_path: Path) -> None:
    """Over a restart of the proxy, too."""
    project = init(tmp_path / "ward", 1, port=free_port())
    link = TinyLink(project)
    with proxy_process(project, link.address) as (address, process):
        sender = Sender(project, 0, address)
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            sender.pull()
        register(project, 0)
        assert sender.pull().messages_list
        port = address.partition(":")[2]
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == 0
        with proxy_process(project, link.address, port=port):
            assert (
                sender.post("/v1/fleet/push-messages", sender.reply().SerializeToString()).status_code == 200
            )  # to a letter of before
            (project.server / "registered.json").write_text("{}")
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                sender.pull()
