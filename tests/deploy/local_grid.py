"""A federation without sockets: the real apps, real messages, and a grid that calls the ClientApp at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from holdfast.deploy.client_app import app
from holdfast.deploy.envelope import NodeSigner, Subject

Tamper = Callable[[Message, Message], Message | None]


def travel(message: Message) -> Message:
    """Through Flower's serialisation, as over a socket."""
    name = message.object_id
    out: Message = inflate_object_from_contents(
        name, {i: o.deflate() for i, o in get_all_nested_objects(message).items()}
    )
    out.metadata.__dict__["_message_id"] = name
    return out


def be_server(attempt: int = 1) -> None:
    """Messages can be made only inside a Flower task: this process pretends to be one."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = attempt, 1, 1


class LocalRuntime:
    """As much of Flower's runtime interface as the server uses to fetch replies: announcements, and objects
    by their digest."""

    def __init__(self) -> None:
        self.announced: dict[str, Message] = {}
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []

    def put(self, letter: str, reply: Message) -> None:
        """Kept as bytes, as the SuperLink does."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.announced[letter] = reply
        self.objects |= {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}

    def PullMessages(self, request: Any) -> Any:  # noqa: N802, Flower's name
        found = [self.announced.pop(letter) for letter in request.message_ids if letter in self.announced]
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(reply)) for reply in found]
        )

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        self.asked.append(request.object_id)
        content = self.objects.get(request.object_id)
        return PullObjectResponse(
            object_found=content is not None, object_available=bool(content), object_content=content or b""
        )

    def ConfirmMessageReceived(self, request: Any) -> Any:  # noqa: N802
        return ConfirmMessageReceivedResponse()


class LocalGrid(Grid):
    """Node 1000 + i is client i. `tamper` may change a reply, given the request, or swallow it (None); it is
    the client itself that does so and signs the outcome, unless `signs` is false: then it is somebody on the
    way."""

    signs = True

    def __init__(
        self,
        home: Path,
        settings: dict[str, Any],
        clients: int = 3,
        attempt: int = 1,
        tamper: Tamper | None = None,
    ):
        be_server(attempt)
        self.tamper = tamper
        self.asked: list[Message] = []
        self._runtime_client, self._run, self.node = (
            LocalRuntime(),
            SimpleNamespace(run_id=attempt),
            Node(node_id=1),
        )
        self.nodes = {
            1000 + i: Context(
                attempt,
                1000 + i,
                {"client-id": i, "state-dir": str(home / f"node{i}")},
                RecordDict(),
                settings,
            )
            for i in range(clients)
        }

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._deliver(travel(message)) for message in messages]

    def _deliver(self, message: Message) -> str:
        self.asked.append(message)
        try:
            reply: Message | None = app(message, self.nodes[message.metadata.dst_node_id])
        except Exception as error:  # as flwr-clientapp does
            reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
        if self.tamper is not None and reply is not None:
            reply = self.tamper(message, reply)
            if self.signs:
                self._sign(message, reply)
        if reply is not None:
            self._runtime_client.put(message.metadata.message_id, reply)
        return str(message.metadata.message_id)

    def _sign(self, message: Message, reply: Message | None) -> None:
        """A client that lies signs what it says, where it has a key; without an envelope there is nothing to
        sign."""
        signer = NodeSigner.of(self.nodes[message.metadata.dst_node_id].node_config)
        if (
            signer is not None
            and reply is not None
            and reply.has_content()
            and "header" in message.content
            and "post" in reply.content
        ):
            header = message.content["header"]
            about = {name: header[name] for name in ("run", "round", "step", "task")}
            signer.sign(reply.content, Subject(**about, client=signer.client))  # type: ignore[arg-type]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError
