"""Letters are matched by our own table: what a reply says of itself is not believed, and what cannot be
attributed is nobody's fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat  # noqa: E402
from flwr.app import ConfigRecord, Error, Message, RecordDict  # noqa: E402
from flwr.proto.node_pb2 import Node  # noqa: E402

from holdfast.core.reading import read_json  # noqa: E402
from holdfast.deploy.envelope import NodeSigner, Subject  # noqa: E402
from holdfast.deploy.messaging import Messaging, Request, answer, pack_client, read_client  # noqa: E402
from holdfast.deploy.replies import Malformed, ReplyLimits  # noqa: E402
from tests.deploy.local_grid import LocalRuntime, be_server, travel  # noqa: E402

Behaviour = Callable[[Message], Message | None]
Runtime = Callable[[], LocalRuntime]
LIMITS = ReplyLimits(objects=20, size=1 << 16)


class Nodes:
    """As much of a grid as Messaging needs: node i answers by behaviours[i]."""

    def __init__(self, behaviours: dict[int, Behaviour], runtime: Runtime = LocalRuntime):
        be_server()
        self.behaviours, self._runtime_client = behaviours, runtime()
        self._run, self.node = SimpleNamespace(run_id=1), Node(node_id=1)
        self.sent: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in map(travel, messages):
            reply = self.behaviours[message.metadata.dst_node_id](message)
            if reply is not None:
                self._runtime_client.put(message.metadata.message_id, reply)
            self.sent.append(message)
            names.append(message.metadata.message_id)
        return names


def requests(nodes: Iterable[int], deadline: float = 0.1) -> dict[int, Request]:
    return {
        node: Request(RecordDict(), lambda content: read_client(content, 10), LIMITS, deadline)
        for node in nodes
    }


def ask(behaviours: dict[int, Behaviour], runtime: Runtime = LocalRuntime, deadline: float = 0.1) -> Any:
    return Messaging(Nodes(behaviours, runtime), poll=0.01).ask("query", requests(behaviours, deadline))  # type: ignore[arg-type]


def honest(message: Message) -> Message:
    return answer(pack_client(7), message)


def silent(message: Message) -> None:
    return None


def test_answers_errors_and_silence_are_distinguished() -> None:
    replies = ask({1: honest, 2: lambda m: Message(Error(2, "boom"), reply_to=m), 3: silent})
    assert replies.answers == {1: 7}
    assert replies.missing == {2: "error 2: boom", 3: "no answer within 0.1 s"}
    assert not replies.malformed and replies.late == {3} and replies.seconds.keys() == {1, 2}


def test_each_request_has_its_own_deadline() -> None:
    nodes = Nodes({1: silent, 2: silent})
    replies = Messaging(nodes, poll=0.01).ask("query", requests([1], 0.05) | requests([2], 0.2))  # type: ignore[arg-type]
    assert replies.missing == {1: "no answer within 0.05 s", 2: "no answer within 0.2 s"}


def test_half_a_reply_delays_others_at_most_until_the_deadline() -> None:
    """Its last piece never comes: the others' answers are taken meanwhile."""

    class Half(LocalRuntime):
        def put(self, name: str, reply: Message) -> None:
            super().put(name, reply)
            if reply.content["client"]["client"] == 6:
                self.objects[reply.content["client"].object_id] = b""

    replies = ask({1: lambda m: answer(pack_client(6), m), 2: honest}, Half, deadline=0.3)
    assert (
        replies.answers == {2: 7}
        and replies.missing == {1: "its answer was announced and did not come within 0.3 s"}
        and replies.late == {1}
    )


def test_the_sender_that_a_reply_names_is_not_believed() -> None:
    def spoof(message: Message) -> Message:
        reply = honest(message)
        reply.metadata.__dict__["_src_node_id"] = 2
        return reply

    replies = ask({1: spoof, 2: silent})
    assert set(replies.answers) == {1} and set(replies.missing) == {2}


@pytest.mark.parametrize("nonce", [{}, {"nonce": "guess"}, {"nonce": "\u00fc"}, {"nonce": 5}, None])
def test_a_reply_without_the_nonce_is_dropped_without_a_strike(nonce: dict[str, Any] | None) -> None:
    def forge(message: Message) -> Message:
        content = pack_client(7)
        if nonce is not None:
            content["post"] = ConfigRecord(nonce)
        return Message(content, reply_to=message)

    replies = ask({1: forge})
    why = "wrong nonce" if nonce is not None else "it has no envelope"
    assert (
        not replies.answers
        and not replies.malformed
        and replies.missing == {1: f"a reply that cannot be attributed: {why}"}
    )


def test_a_message_that_replies_to_another_request_or_to_none_is_ignored() -> None:
    """The SuperLink hands messages that reply to nothing to every pull: two of them were enough to have an
    honest client struck."""

    class Loose(LocalRuntime):
        def PullMessages(self, request: Any) -> Any:  # noqa: N802
            said = super().PullMessages(request)
            for target in ("", "0" * 64):
                stray = said.messages_list.add()
                stray.metadata.reply_to_message_id, stray.metadata.message_id, stray.metadata.src_node_id = (
                    target,
                    "f" * 64,
                    2,
                )
            return said

    replies = ask({1: honest, 2: silent}, Loose)
    assert (
        replies.answers == {1: 7}
        and not replies.malformed
        and replies.missing == {2: "no answer within 0.1 s"}
    )


def test_a_reply_that_cannot_be_read_costs_only_its_sender() -> None:
    def garbage(message: Message) -> Message:
        return answer(RecordDict({"client": ConfigRecord({"client": 77})}), message)

    replies = ask({1: honest, 2: garbage, 3: honest})
    assert set(replies.answers) == {1, 3} and replies.malformed == {2: "client id 77, expected 0 to 9"}


class Failing(LocalRuntime):
    """The SuperLink itself fails, by this error."""

    error: Exception

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        raise self.error


def failing(error: Exception) -> Runtime:
    return type("Failing", (Failing,), {"error": error})


def status(code: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError(
        "no", request=httpx.Request("POST", "http://x"), response=httpx.Response(code)
    )


@pytest.mark.parametrize("error", [httpx.ConnectError("down"), status(403)])
def test_a_broken_network_is_not_held_against_a_client(error: Exception) -> None:
    with pytest.raises(type(error)):
        ask({1: honest}, failing(error))


def test_a_superlink_that_stumbles_over_one_reply_does_not_stop_the_run() -> None:
    class Stumbling(LocalRuntime):
        def PullMessages(self, request: Any) -> Any:  # noqa: N802
            if any(name in self.bad for name in request.message_ids):
                raise status(500)
            return super().PullMessages(request)

        @property
        def bad(self) -> set[str]:
            return {name for name, reply in self.announced.items() if reply.metadata.src_node_id == 2}

    replies = ask({1: honest, 2: honest, 3: honest}, Stumbling)
    assert (
        set(replies.answers) == {1, 3}
        and replies.missing == {2: "no answer within 0.1 s"}
        and not replies.malformed
    )


def test_what_a_node_says_of_its_failure_is_one_line_without_commands_to_a_terminal() -> None:
    replies = ask({1: lambda m: Message(Error(2, "bo\x1b[31m\nom"), reply_to=m)})
    assert replies.missing == {1: "error 2: bo om"}


def test_no_requests_give_no_replies() -> None:
    replies = ask({})
    assert not replies.answers and not replies.missing


@pytest.mark.parametrize("client", [-1, 10, "3", 3.0])
def test_client_ids_are_checked(client: Any) -> None:
    content = RecordDict({"client": ConfigRecord({"client": client}), "post": ConfigRecord({})})
    with pytest.raises(Malformed, match="expected 0 to 9"):
        read_client(content, 10)


# ---- with keys

SERVER, CLIENT, OTHER = (ec.generate_private_key(ec.SECP384R1()) for _ in range(3))
ABOUT = Subject("run", 3, 0, "train", 7)


def public(key: ec.EllipticCurvePrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def ask_signed(
    behaviour: Behaviour, mark: Path | None = None, read: Callable[[RecordDict], Any] | None = None
) -> tuple[Any, Messaging]:
    messaging = Messaging(Nodes({1: behaviour}), poll=0.01, key=SERVER, mark=mark)  # type: ignore[arg-type]
    request = Request(
        RecordDict(), read or (lambda content: read_client(content, 10)), LIMITS, 0.1, ABOUT, public(CLIENT)
    )
    return messaging.ask("train", {1: request}), messaging


def signing(
    key: ec.EllipticCurvePrivateKey,
    subject: Subject = ABOUT,
    spoil: Callable[[Message], None] = lambda reply: None,
) -> Behaviour:
    """Signs, and then somebody on the way may spoil it."""

    def reply(message: Message) -> Message:
        made = honest(message)
        NodeSigner(7, public(SERVER), key, Path()).sign(made.content, subject)
        spoil(made)
        return made

    return reply


def other_content(reply: Message) -> None:
    reply.content["client"] = ConfigRecord({"client": 5})


def one_more(reply: Message) -> None:
    reply.content["more"] = ConfigRecord({"client": 5})


@pytest.mark.parametrize(
    "behaviour",
    [
        honest,
        signing(OTHER),
        signing(CLIENT, spoil=other_content),
        signing(CLIENT, spoil=one_more),
        *(
            signing(CLIENT, Subject(**{**vars(ABOUT), name: value}))  # type: ignore[arg-type]
            for name, value in [("run", "old"), ("round", 2), ("step", 1), ("task", "score"), ("client", 6)]
        ),
    ],
)
def test_a_reply_that_the_client_has_not_signed_for_this_request_is_dropped_without_a_strike(
    behaviour: Behaviour,
) -> None:
    """Unsigned, with another key, with other content, for another run, round, step, task or client."""
    replies, messaging = ask_signed(behaviour)
    assert replies.missing == {1: "a reply that cannot be attributed: it is not signed with the client's key"}
    assert not replies.answers and not replies.malformed and messaging.unproven == 1


def test_a_signed_reply_is_read_and_its_faults_are_the_senders() -> None:
    assert ask_signed(signing(CLIENT))[0].answers == {1: 7}

    def nonsense(message: Message) -> Message:
        made = answer(pack_client(99), message)
        NodeSigner(7, public(SERVER), CLIENT, Path()).sign(made.content, ABOUT)
        return made

    assert ask_signed(nonsense)[0].malformed == {1: "client id 99, expected 0 to 9"}


def test_a_file_names_the_client_while_its_reply_is_read(tmp_path: Path) -> None:
    """A process that is killed for lack of memory says nothing any more."""
    seen: list[Any] = []
    replies, _ = ask_signed(
        signing(CLIENT),
        tmp_path / "reading.json",
        lambda content: seen.append(read_json(tmp_path / "reading.json")),
    )
    assert replies.answers == {1: None} and seen == [vars(ABOUT)] and not (tmp_path / "reading.json").exists()


def test_a_reply_that_comes_while_another_is_read_is_not_late() -> None:
    """Reading a large model takes longer than the deadline of a client whose reply is there already."""

    class Slow(LocalRuntime):
        def PullObject(self, request: Any) -> Any:  # noqa: N802
            time.sleep(0.05)
            return super().PullObject(request)

    replies = ask({node: lambda m: answer(pack_client(7), m) for node in range(1, 9)}, Slow, deadline=0.3)
    assert replies.answers == dict.fromkeys(range(1, 9), 7) and not replies.late
