"""The rules for what a node may ask of the SuperLink's fleet interface, and what its requests may contain.

Flower checks that the sender has a key, and little else: it accepts messages that reply to nothing, from any
source that the sender claims (also the server itself), and as many objects as are announced, each of which
costs a few statements in the database. So every request is parsed before it is forwarded, within bounds that
are checked before it is read.

Not checked, because nothing can be gained: which node pulls or confirms an object or a message. Their ids are
digests of contents with a random number inside, so a node knows only ids that it was given. A pushed object
must name its session, whose id is random too."""

from __future__ import annotations

import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.run_pb2 import GetRunRequest
from google.protobuf.message import DecodeError

from holdfast.deploy.proxy_keys import Node

FLEET = "/v1/fleet/"
PUSH, ANNOUNCE, PULL = FLEET + "push-object", FLEET + "push-messages", FLEET + "pull-messages"
CALLS: dict[str, Any] = {
    FLEET + "activate-node": ActivateNodeRequest,
    FLEET + "deactivate-node": DeactivateNodeRequest,
    FLEET + "send-node-heartbeat": SendNodeHeartbeatRequest,
    FLEET + "get-run": GetRunRequest,
    FLEET + "get-fab": GetFabRequest,
    FLEET + "pull-object": PullObjectRequest,
    FLEET + "confirm-message-received": ConfirmMessageReceivedRequest,
    PULL: PullMessagesRequest,
    ANNOUNCE: PushMessagesRequest,
    PUSH: PushObjectRequest,
}
"""All that a SuperNode with a key ever calls: not register-node, and not unregister-node."""
LARGEST_OBJECT = 16_000_000
"""Bytes of a pushed object with its envelope: Flower cuts arrays into pieces of 5 MB, and no other part of a
reply is large."""
_PLAIN = 16_000  # bytes of a request that carries ids and numbers only
_ANNOUNCED = 96  # largest number of bytes that an object takes in an announcement: its id has 64
_ENVELOPE = 256_000  # further bytes of an announcement: it also reports errors, as text
_DEPTH = 10  # levels of a tree of objects: message, records, record, array, piece have five
_ID = re.compile("[0-9a-f]{64}")
_SESSION = re.compile("[0-9a-f-]{36}")
_REMEMBERED = 64  # messages that are remembered for each node; it works on one at a time
_UNKNOWN = 2  # messages of a node that it may have received before this process started
_FAR_TOO_MANY = 10  # times what the operator allows: that may be too little for an honest model
_TIMES = 4  # how often one reply is accepted, since a receipt may be lost
_OFFENCES = ("name", "order", "objects", "object", "path")


class Refused(Exception):
    """A request that is not forwarded. An offence is something that no honest node does, whichever version of
    Flower it has and however slow or broken it is. What another version of Flower might write in another form
    is refused and is not an offence."""

    def __init__(self, words: str, kind: str, status: int = 403):
        super().__init__(words)
        self.words, self.kind, self.status, self.offence = words, kind, status, kind in _OFFENCES


@dataclass
class _SentMessage:
    """A message that a node was sent, and its reply so far."""

    run: int | None = None
    reply: str = ""
    times: int = 0


@dataclass
class Rules:
    """The rules, with `largest` (bytes of a request) and `objects` (objects of one reply)."""

    largest: int
    objects: int
    numbers: Callable[[], Collection[int]] = tuple
    """Returns the node ids that are registered now."""
    sent: dict[str, OrderedDict[str, _SentMessage]] = field(default_factory=lambda: defaultdict(OrderedDict))
    unknown: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def check_path(self, path: str, method: str, query: bytes) -> None:
        if path not in CALLS:
            deliberate = not path.startswith(FLEET) or path in (
                FLEET + "register-node",
                FLEET + "unregister-node",
            )
            raise Refused("called what nodes may not call", "path" if deliberate else "form")
        if method != "POST" or query:
            raise Refused("called in a way that Flower does not", "form")

    def check_size(self, path: str, size: int) -> None:
        """Check the size of a body before it is read."""
        if path == ANNOUNCE and size > self.objects * _ANNOUNCED + _ENVELOPE:
            kind = "objects" if size > _FAR_TOO_MANY * self.objects * _ANNOUNCED else "many"
            raise Refused(
                f"announced a reply in {size} bytes, more than {self.objects} objects need", kind, 413
            )
        if path == PUSH and size > LARGEST_OBJECT:
            raise Refused(
                f"sent an object of {size} bytes; the limit is {LARGEST_OBJECT}",
                "object",
                413,
            )
        if path not in (PUSH, ANNOUNCE) and size > _PLAIN:
            raise Refused(f"sent {size} bytes in a request that carries only ids", "form", 413)
        # The operator sets this limit, and it may be too small for an honest node.
        if path in (PUSH, ANNOUNCE) and size > self.largest:
            raise Refused(
                f"sent {size} bytes in one request; federation.largest is {self.largest}", "largest", 413
            )

    def check(self, path: str, body: bytes, node: Node) -> Any:
        """Parse the request and check its contents."""
        try:
            request = CALLS[path].FromString(body)
        except (DecodeError, RecursionError):
            raise Refused("sent a request that cannot be read", "form", 400) from None
        if path == FLEET + "activate-node":
            if request.public_key != node.key:
                raise Refused("activated the key of another node", "name")
        elif (
            sender := request.node_id if path == FLEET + "deactivate-node" else request.node.node_id
        ) != node.number:
            raise Refused(f"sent a request in the name of node {sender}", self._kind_of(sender))
        if path == ANNOUNCE:
            self._check_reply(request, node)
        elif path == PUSH and not (
            _ID.fullmatch(request.object_id) and _SESSION.fullmatch(request.session_id)
        ):
            raise Refused("sent an object without its id or its session", "form", 400)
        return request

    def _check_reply(self, request: PushMessagesRequest, node: Node) -> None:
        if (
            len(request.messages_list) != 1
            or len(request.message_object_trees) != 1
            or len(request.clientapp_runtime_list) > 1
        ):
            raise Refused(f"announced {len(request.messages_list)} messages at once", "form", 400)
        message, tree = request.messages_list[0], request.message_object_trees[0]
        about = message.metadata
        if about.src_node_id != node.number:
            raise Refused(
                f"sent a message in the name of node {about.src_node_id}", self._kind_of(about.src_node_id)
            )
        if not about.reply_to_message_id or about.dst_node_id != SUPERLINK_NODE_ID:
            raise Refused("sent a message that is not a reply to the server", "order")
        numbers = (about.ttl, about.created_at, *request.clientapp_runtime_list)
        if (
            not _ID.fullmatch(about.reply_to_message_id)
            or not all(map(math.isfinite, numbers))
            or message.content.ByteSize() > 0
        ):
            raise Refused("announced a message that is not as Flower writes it", "form", 400)
        _check_tree(tree, self.objects)
        if about.message_id != tree.object_id:
            raise Refused("announced a message with the objects of another", "form", 400)
        self._check_answered_once(about, node)

    def _kind_of(self, sender: int) -> str:
        """Return the kind of a request with a wrong sender. Another node's id is an offence. An unknown id
        may be the node's own from before the SuperLink's database was lost."""
        return "name" if sender in (SUPERLINK_NODE_ID, *self.numbers()) else "form"

    def _check_answered_once(self, about: Any, node: Node) -> None:
        """Check that a node answers a message that it was sent, and only once. Otherwise the reply is refused
        but not an offence: an abandoned task may still end with a reply."""
        sent = self.sent[node.fingerprint]
        message = sent.get(about.reply_to_message_id)
        if message is None:
            if self.unknown[node.fingerprint] >= _UNKNOWN:
                raise Refused("answered a message that it was not sent", "letter", 409)
            self.unknown[node.fingerprint] += 1
            message = self._remember(node, about.reply_to_message_id, _SentMessage())
        if message.run not in (None, about.run_id):
            raise Refused("answered a message of another run", "form", 400)
        if message.reply not in ("", about.message_id) or message.times >= _TIMES:
            raise Refused("answered one message more than once", "letter", 409)
        message.reply = about.message_id

    def take_note(self, path: str, request: Any, reply: bytes, node: Node) -> None:
        """Remember what the SuperLink has answered: messages to a node, and replies that it took."""
        if path == PULL:
            for message in PullMessagesResponse.FromString(reply).messages_list:
                about = message.metadata
                self._remember(node, about.message_id, _SentMessage(about.run_id))
        elif path == ANNOUNCE:
            message = self.sent[node.fingerprint].get(request.messages_list[0].metadata.reply_to_message_id)
            if message is not None:
                message.times += 1

    def _remember(self, node: Node, name: str, message: _SentMessage) -> _SentMessage:
        sent = self.sent[node.fingerprint]
        sent[name] = message
        if len(sent) > _REMEMBERED:
            sent.popitem(last=False)
        return message


def _check_tree(tree: ObjectTree, most: int) -> None:
    """Check a tree of announced objects. Every mention of an object costs the database."""
    count, layer = 1, [tree]
    for _ in range(_DEPTH):
        if not all(_ID.fullmatch(one.object_id) for one in layer):
            raise Refused("announced an object without an id", "form", 400)
        count += sum(len(one.children) for one in layer)
        if count > most:
            kind = "objects" if count > _FAR_TOO_MANY * most else "many"
            raise Refused(
                f"announced more than {most} objects in one reply, which federation.objects allows", kind, 413
            )
        if any(len({child.object_id for child in one.children}) < len(one.children) for one in layer):
            raise Refused("announced one object twice", "form", 400)
        layer = [child for one in layer for child in one.children]
        if not layer:
            return
    raise Refused("announced objects that are nested too deeply", "form", 400)
