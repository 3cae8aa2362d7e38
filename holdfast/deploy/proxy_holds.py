"""Nodes ask for messages without a pause: the proxy holds an empty answer until there might be a message. It
also notices which message has been answered in full, and tells the ServerApp.

Flower's own nodes ask every three seconds, whether there is something or not, and its ServerApp asks several
times a second."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from flwr.proto.fleet_pb2 import PushMessagesResponse

from holdfast.deploy.fleet_rules import ANNOUNCE, PUSH
from holdfast.deploy.notices import Notices
from holdfast.deploy.proxy_keys import Node

HOLD = 10.0
"""Seconds that an empty answer is held at most: a node gives a server thirty to answer."""


@dataclass
class _Announced:
    """The last reply that a node has announced, and what of it is still to come."""

    session: str
    message: str
    left: set[str]


class Holds:
    """What nodes wait for, and the reply that each is sending. Without notices nothing is held."""

    def __init__(self, notices: Notices | None = None):
        self.notices, self.open = notices, notices is not None
        self.posted = 0
        self.waiting: set[asyncio.Event] = set()
        self.announced: dict[str, _Announced] = {}  # by fingerprint, so it is bounded
        if notices is not None:
            asyncio.get_running_loop().add_reader(notices.socket, self._read)

    def _read(self) -> None:
        if self.notices is not None and self.notices.wait(0.0):
            self.posted += 1
            self._wake()

    def _wake(self) -> None:
        for event in self.waiting:
            event.set()

    def end(self) -> None:
        """Answer all that is held, and hold nothing more."""
        self.open = False
        self._wake()

    async def hold(self, posted: int) -> None:
        """Wait until there are messages that were not there yet when `posted` was read."""
        if not self.open or posted != self.posted:
            return
        event = asyncio.Event()
        self.waiting.add(event)
        try:
            async with asyncio.timeout(HOLD):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            self.waiting.discard(event)

    def take_note(self, path: str, request: Any, reply: bytes, node: Node) -> None:
        """Follow a reply that the SuperLink accepts; tell the ServerApp when all of it is there."""
        if self.notices is None or path not in (ANNOUNCE, PUSH):
            return
        if path == ANNOUNCE:
            said = PushMessagesResponse.FromString(reply)
            name = request.messages_list[0].metadata.reply_to_message_id
            one = _Announced(said.session_id, name, set(said.objects_to_push))
            self.announced[node.fingerprint] = one
        else:
            last = self.announced.get(node.fingerprint)
            if last is None or last.session != request.session_id:
                return
            one = last
            one.left.discard(request.object_id)
        if not one.left:
            del self.announced[node.fingerprint]
            self.notices.send(one.message)
