"""A federation without sockets: the real apps, real messages, and a grid that calls the ClientApp at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from holdfast.deploy.client_app import app

Tamper = Callable[[Message, Message], Message | None]


def travel(message: Message) -> Message:
    """Through Flower's serialisation, as over a socket."""
    name = message.object_id
    out: Message = inflate_object_from_contents(name, {i: o.deflate() for i, o in get_all_nested_objects(message).items()})
    out.metadata.__dict__["_message_id"] = name
    return out


def be_server(attempt: int = 1) -> None:
    """Messages can be made only inside a Flower task: this process pretends to be one."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = attempt, 1, 1


class LocalGrid(Grid):
    """Node 1000 + i is client i. `tamper` may change a reply, given the request, or swallow it (None)."""

    def __init__(self, home: Path, settings: dict[str, Any], clients: int = 3, attempt: int = 1, tamper: Tamper | None = None):
        be_server(attempt)
        self.tamper = tamper
        self.asked: list[Message] = []
        self.replies: dict[str, Message] = {}
        self.nodes = {
            1000 + i: Context(attempt, 1000 + i, {"client-id": i, "state-dir": str(home / f"node{i}")}, RecordDict(), settings)
            for i in range(clients)
        }

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
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
        if reply is not None:
            self.replies[message.metadata.message_id] = travel(reply)
        return str(message.metadata.message_id)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(i) for i in message_ids if i in self.replies]
