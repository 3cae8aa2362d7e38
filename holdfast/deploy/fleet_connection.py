"""The connection of a node to its SuperLink: Flower's fleet interface, through Flower's own client.

It replaces the loop of Flower's SuperNode, which keeps every message in a store of its own, behind a second
server, for a new Python process that is started to answer it, and looks for messages every three seconds.
Here the process that has the connection answers the message itself, and an empty answer is followed by the
next question at once: the proxy answers it when there is something (proxy_holds.py).

It uses parts of flwr 1.41 that Flower does not document (FleetHttpClient, and how a message is taken apart
into objects); tests/deploy/test_fleet_connection.py fails when they change."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_CALL_TIMEOUT, HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import fab_from_proto, message_from_proto, message_to_proto, run_from_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient

from holdfast.core.errors import RunError
from holdfast.deploy.fleet_headers import FleetHeaders
from holdfast.deploy.heartbeat import note_away
from holdfast.deploy.processes import LOST

_AWAY = (502, 503, 504)  # the server does not answer at present
_TRIES = 5  # after another failure of the server, such as a locked database
_LONGEST = 20.0  # seconds between two tries
_BEAT = 0.75 * (HEARTBEAT_DEFAULT_INTERVAL - HEARTBEAT_CALL_TIMEOUT)  # seconds between two signs of life
_TLS = ("certificate", "ssl", "tls")


class RunEnded(Exception):
    """The SuperLink no longer takes part in the run of this message."""


class Lost(Exception):
    """The server does not know this node, or no longer."""


class FleetConnection:
    """The calls of one node. Without an authority the connection is not encrypted; without a key the node
    registers one of its own. Both are for trials."""

    def __init__(self, superlink: str, authority: Path | None, key: ec.EllipticCurvePrivateKey | None):
        self.registers = key is None
        private, public = (key, key.public_key()) if key is not None else generate_key_pairs()
        self.public = public_key_to_bytes(public)
        self.client = FleetHttpClient.from_server_address(
            superlink,
            insecure=authority is None,
            root_certificates=None if authority is None else authority.read_bytes(),
            interceptors=[FleetHeaders(private, public)],
        )
        self.reached = False
        self.node = Node()
        self.kept: dict[str, bytes] = {}

    def __enter__(self) -> FleetConnection:
        try:
            if self.registers:
                self.call(self.client.RegisterNode, RegisterNodeFleetRequest(public_key=self.public))
            request = ActivateNodeRequest(
                public_key=self.public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
            )
            self.node = Node(node_id=self.call(self.client.ActivateNode, request).node_id)
        except (httpx.HTTPError, Lost, RunEnded) as error:
            raise RunError(f"the SuperLink does not accept this node: {_explained(error)}") from None
        self.heartbeat = Heartbeat(self._beat)
        self.heartbeat.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Tell the server that this node leaves, so that it can come back at once."""
        self.heartbeat.stop()
        try:
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))
            if self.registers:
                self.client.UnregisterNode(UnregisterNodeFleetRequest(node_id=self.node.node_id))
        except (httpx.HTTPError, RuntimeError):
            pass

    def call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """Return the answer of the server; wait for a server that is away. A server that was never reached
        may be the wrong one: then an error of TLS is raised, and the supervisor of the node tries again."""
        tries, away = 0, False
        while True:
            try:
                answer = method(request)
            except httpx.TransportError as error:
                if not self.reached and any(word in str(error).lower() for word in _TLS):
                    raise
            except httpx.HTTPStatusError as error:
                code = error.response.status_code
                if code == httpx.codes.UNAUTHORIZED:
                    raise Lost("the server does not know this node any more") from None
                if code == httpx.codes.FORBIDDEN:
                    raise RunEnded from None
                if code < 500 or (code not in _AWAY and tries >= _TRIES):
                    raise
            else:
                if not self.reached or away:
                    note_away(False)
                self.reached = True
                return answer
            tries, away = tries + 1, True
            note_away(True)
            time.sleep(min(_LONGEST, 2 ** min(tries, 10) / 2) * random.uniform(0.5, 1.0))

    def pull(self) -> tuple[Message, Any] | None:
        """Return the next message without its content, and the tree of its objects; None if there is none."""
        said = self.call(self.client.PullMessages, PullMessagesRequest(node=self.node))
        if not said.messages_list:
            return None
        return message_from_proto(said.messages_list[0]), said.message_object_trees[0]

    def fetch(self, message: Message, tree: Any) -> Message:
        """Return a message with its content. Objects that the last message had are not fetched again: a model
        that was measured is often trained on next. Every object has the digest that is its name."""
        run, name = message.metadata.run_id, message.metadata.message_id
        wanted = dict.fromkeys(one.object_id for one in iterate_object_tree(tree))
        pull = make_pull_object_fn_protobuf(
            lambda request: self.call(self.client.PullObject, request), self.node, run
        )
        fetched = pull_objects([one for one in wanted if one not in self.kept], pull)
        if any(get_object_id(content) != one for one, content in fetched.items()):
            raise ValueError("the server sent an object that is not its digest's")
        self.kept = {one: fetched[one] if one in fetched else self.kept[one] for one in wanted}
        make_confirm_message_received_fn_protobuf(
            lambda request: self.call(self.client.ConfirmMessageReceived, request), self.node, run
        )(name)
        whole = inflate_object_from_contents(name, dict(self.kept))
        if not isinstance(whole, Message):
            raise ValueError("the server sent something else than a message")
        whole.metadata.__dict__["_message_id"] = name
        return whole

    def send(self, reply: Message, seconds: float) -> None:
        """Send a reply; `seconds` is how long it took."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            request = PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            said = self.call(self.client.PushMessages, request)
            push = make_push_object_fn_protobuf(
                lambda request: self.call(self.client.PushObject, request),
                self.node,
                reply.metadata.run_id,
                said.session_id,
            )
            push_objects(get_all_nested_objects(reply), push, object_ids_to_push=set(said.objects_to_push))

    def settings_of(self, run: int) -> dict[str, Any]:
        """Return the settings of a run. Only a trial needs them: a node of a federation has its own. They are
        read from the app that Flower sends; nothing of it is executed."""
        from flwr.common.config import get_fused_config_from_fab

        about = run_from_proto(self.call(self.client.GetRun, GetRunRequest(node=self.node, run_id=run)).run)
        request = GetFabRequest(node=self.node, hash_str=about.fab_hash, run_id=run)
        fab = fab_from_proto(self.call(self.client.GetFab, request).fab)
        return dict(get_fused_config_from_fab(fab.content, about))

    def _beat(self) -> bool:
        try:
            said = self.client.SendNodeHeartbeat(
                SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
            )
        except httpx.TransportError:
            return False
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            if code >= 500 or code == httpx.codes.UNAUTHORIZED:  # 401: the next question tells
                return False
            raise
        if not said.success:
            raise RuntimeError("the SuperLink does not know this node any more")
        return True


class Heartbeat:
    """Tells the server regularly that the node is there. Ends the process when that fails for good: the
    server would consider the node gone while it goes on asking for messages."""

    def __init__(self, beat: Callable[[], bool]):
        self.beat, self.stopped = beat, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()

    def _run(self) -> None:
        tries = 0
        try:
            while not self.stopped.is_set():
                tries = 0 if self.beat() else tries + 1
                longest = min(_LONGEST, 2.0**tries) if tries else _BEAT
                self.stopped.wait(longest * random.uniform(0.8, 1.0))
        except BaseException:
            traceback.print_exc()
            leave(LOST, "the heartbeat has stopped; this node exits")


def leave(code: int, line: str) -> None:
    """Exit without waiting for threads."""
    print(line, file=sys.stderr, flush=True)
    os._exit(code)


def _explained(error: Exception) -> str:
    from flwr.supercore.error import FlowerError

    if isinstance(error, httpx.HTTPStatusError) and (said := FlowerError.from_json(error.response.text)):
        return f"[code: {said.code}] {said.message}"
    return str(error) or type(error).__name__
