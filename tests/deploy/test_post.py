"""Letters are matched by our own table: what a reply says of itself is not believed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import ConfigRecord, Error, Message, RecordDict  # noqa: E402

from holdfast.deploy.post import Malformed, Post, answer, pack_client, read_client  # noqa: E402
from tests.deploy.local_grid import be_server, travel  # noqa: E402

Behaviour = Callable[[Message], Message | None]


class Nodes:
    """As much of a grid as Post needs: node i answers by behaviours[i]."""

    def __init__(self, behaviours: dict[int, Behaviour]):
        be_server()
        self.behaviours = behaviours
        self.replies: dict[str, Message | None] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        for message in map(travel, messages):
            self.replies[message.metadata.message_id] = self.behaviours[message.metadata.dst_node_id](message)
        return list(self.replies)

    def pull_messages(self, message_ids: list[str]) -> list[Message]:
        found = [self.replies[i] for i in message_ids]
        if any(isinstance(reply, Exception) for reply in found):
            raise found[0]  # type: ignore[misc]
        return [reply for reply in found if reply is not None]


def ask(behaviours: dict[int, Behaviour]) -> Any:
    return Post(Nodes(behaviours), poll=0.01).ask("query", {node: RecordDict() for node in behaviours}, deadline=0.1)  # type: ignore[arg-type]


def honest(message: Message) -> Message:
    return answer(pack_client(7), message)


def test_answers_errors_and_silence_are_told_apart() -> None:
    mail = ask({1: honest, 2: lambda m: Message(Error(2, "boom"), reply_to=m), 3: lambda m: None})
    assert set(mail.answers) == {1} and read_client(mail.answers[1], 10) == 7
    assert mail.missing == {2: "error 2: boom", 3: "no answer within 0.1 s"}
    assert not mail.malformed


def test_half_a_reply_holds_up_nobody_beyond_the_deadline() -> None:
    """Flower waits for minutes for the parts of a reply that was announced: the others' answers are taken meanwhile."""

    class Half(Nodes):
        def pull_messages(self, message_ids: list[str]) -> list[Message]:
            if message_ids == list(self.replies)[:1]:
                rest.wait(300)
            return super().pull_messages(message_ids)

    rest, nodes = threading.Event(), Half({1: honest, 2: honest})
    mail = Post(nodes, poll=0.01).ask("query", {1: RecordDict(), 2: RecordDict()}, deadline=5)  # type: ignore[arg-type]
    rest.set()
    assert set(mail.answers) == {2} and mail.missing == {1: "no answer within 5 s"}


def test_the_sender_that_a_reply_names_is_not_believed() -> None:
    def spoof(message: Message) -> Message:
        reply = honest(message)
        reply.metadata.__dict__["_src_node_id"] = 2
        return reply

    mail = ask({1: spoof, 2: lambda m: None})
    assert set(mail.answers) == {1} and set(mail.missing) == {2}


@pytest.mark.parametrize("nonce", [{}, {"nonce": "guess"}, {"nonce": "\u00fc"}, {"nonce": 5}, None])
def test_a_reply_without_the_nonce_is_dropped_and_nobody_is_blamed(nonce: dict[str, Any] | None) -> None:
    def forge(message: Message) -> Message:
        content = pack_client(7)
        if nonce is not None:
            content["post"] = ConfigRecord(nonce)
        return Message(content, reply_to=message)

    mail = ask({1: forge})
    assert not mail.answers and not mail.malformed and mail.missing == {1: "wrong nonce"}


def test_a_reply_to_another_letter_is_dropped() -> None:
    def misaddress(message: Message) -> Message:
        reply = honest(message)
        reply.metadata.__dict__["_reply_to_message_id"] = "another"
        return reply

    assert ask({1: misaddress}).missing == {1: "wrong nonce"}


def test_a_reply_that_cannot_be_unpacked_costs_only_its_sender() -> None:
    mail = ask({1: honest, 2: lambda m: ValueError("garbage"), 3: honest})  # type: ignore[return-value,dict-item]
    assert set(mail.answers) == {1, 3} and mail.malformed == {2: "unreadable reply (ValueError: garbage)"}


def test_a_broken_network_is_nobodys_fault() -> None:
    with pytest.raises(httpx.ConnectError):
        ask({1: lambda m: httpx.ConnectError("down")})  # type: ignore[return-value,dict-item]


def test_a_superlink_that_stumbles_over_one_reply_does_not_stop_the_run() -> None:
    def failed(code: int) -> httpx.HTTPStatusError:
        return httpx.HTTPStatusError("no", request=httpx.Request("POST", "http://x"), response=httpx.Response(code))

    mail = ask({1: honest, 2: lambda m: failed(500)})  # type: ignore[return-value,dict-item]
    assert set(mail.answers) == {1} and mail.missing == {2: "no answer within 0.1 s"} and not mail.malformed
    with pytest.raises(httpx.HTTPStatusError):
        ask({1: lambda m: failed(403)})  # type: ignore[return-value,dict-item]


def test_what_a_node_says_of_its_failure_is_one_line_without_commands_to_a_terminal() -> None:
    mail = ask({1: lambda m: Message(Error(2, "bo\x1b[31m\nom"), reply_to=m)})
    assert mail.missing == {1: "error 2: bo [31m om"}


def test_nobody_to_ask() -> None:
    mail = ask({})
    assert not mail.answers and not mail.missing


@pytest.mark.parametrize("client", [-1, 10, "3", 3.0])
def test_client_ids_are_checked(client: Any) -> None:
    content = RecordDict({"client": ConfigRecord({"client": client}), "post": ConfigRecord({})})
    with pytest.raises(Malformed, match="expected 0 to 9"):
        read_client(content, 10)
