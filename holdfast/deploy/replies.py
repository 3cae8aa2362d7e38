"""Fetches one reply from the SuperLink piece by piece, bounded at every piece. Flower's own pull fetches all
that was announced and builds it before it can be checked: an array may name one chunk a thousand times, so 5
MB become gigabytes.

The envelope comes first: message, table of records and envelope are small or refused. A reply whose sender
the envelope does not prove is dropped. Then the payload is fetched record by record, each piece checked
against its digest, until there are more pieces, bytes or levels than the task's schema allows; arrays are
built only when their lengths are known.

This file uses a private part of flwr 1.41: the runtime client of HttpGrid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from flwr.app import ConfigRecord, RecordDict
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_object_head_values_from_object_content,
    is_valid_sha256_hash,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from holdfast.core.errors import in_print
from holdfast.deploy.envelope import ENVELOPE

_SMALL = 1 << 16  # bytes of every object but a chunk of an array
_LEVELS = 6  # message, records, record, array, chunk: five
_CHUNK = "ArrayChunk"


class Malformed(ValueError):
    """A message does not have the agreed form; the text says what is wrong."""


class NotProven(Exception):
    """The sender of a reply cannot be proven; the text says why."""


class NotThere(Exception):
    """A piece that was announced has not arrived yet."""


class NeverComes(Exception):
    """A piece that was announced will not arrive any more."""


@dataclass(frozen=True)
class ReplyLimits:
    """The limits of a reply: number of objects, and bytes in all, also of the arrays once they are built."""

    objects: int
    size: int


class Source(Protocol):
    """Where replies are fetched from; see `SuperLinkSource`."""

    def announced(self, message: str) -> Any:
        """Return the announcement of the reply to this message (flwr's Message proto); None before it is
        there."""
        ...

    def piece(self, name: str) -> bytes: ...

    def confirm(self, name: str) -> None: ...


class SuperLinkSource:
    """The SuperLink, through the client that Flower's grid has."""

    def __init__(self, grid: Any):
        self.grid = grid

    def announced(self, message: str) -> Any:
        """Ask for one message at a time: the SuperLink forgets a reply when it delivers it, so a lost answer
        costs that one reply. Messages that reply to nothing, or to something else, may come too: they are
        ignored."""
        said = self.grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=[message]))
        return next(
            (reply for reply in said.messages_list if reply.metadata.reply_to_message_id == message),
            None,
        )

    def piece(self, name: str) -> bytes:
        said = self.grid._runtime_client.PullObject(
            PullObjectRequest(node=self.grid.node, run_id=self._run, object_id=name)
        )
        if not said.object_found:
            raise NeverComes
        if not said.object_available:
            raise NotThere
        return bytes(said.object_content)

    def confirm(self, name: str) -> None:
        request = ConfirmMessageReceivedRequest(node=self.grid.node, run_id=self._run, message_object_id=name)
        self.grid._runtime_client.ConfirmMessageReceived(request)

    @property
    def _run(self) -> int:
        return int(self.grid._run.run_id)


Proof = Callable[[ConfigRecord, dict[str, str]], None]
"""Raises NotProven unless envelope and digests of the other records are those of the expected sender."""


@dataclass
class Reply:
    """A reply that was announced. `read` continues where it stopped when a piece was not there."""

    source: Source
    name: str
    limits: ReplyLimits
    proven: bool = False
    pieces: dict[str, bytes] = field(default_factory=dict)

    def prove(self, proof: Proof) -> None:
        """Fetch the envelope and check it. Raises NotProven also where the envelope cannot be found or
        read."""
        if self.proven:
            return
        try:
            records = self._records()
            if ENVELOPE not in records:
                raise NotProven("it has no envelope")
            envelope = ConfigRecord.inflate(self._small(records[ENVELOPE]))
        except (NotThere, NeverComes, NotProven):
            raise
        except Exception as error:  # as below: Flower's parsers fail in many ways
            raise NotProven(f"its envelope cannot be read ({_short(error)})") from None
        proof(envelope, {name: digest for name, digest in records.items() if name != ENVELOPE})
        self.proven = True

    def read(self) -> RecordDict:
        """The whole content. Raises Malformed where it is more than allowed, or not what it says it is."""
        try:
            self._fetch()
            self._measure()
            (content,) = self._children(self.name)
            made = inflate_object_from_contents(content, dict(self.pieces))
        except (NotThere, NeverComes, Malformed):
            raise
        # Flower's parsers fail in many ways on hostile input; that is a fault of the sender only
        except Exception as error:
            raise Malformed(f"unreadable reply ({_short(error)})") from None
        if not isinstance(made, RecordDict):
            raise Malformed("the reply is not a table of records")
        return made

    def _records(self) -> dict[str, str]:
        """Names and digests of the records."""
        (content,) = self._children(self.name)
        records = json.loads(self._body(content))
        if not isinstance(records, dict) or not all(isinstance(value, str) for value in records.values()):
            raise ValueError("no table of records")
        return records

    def _fetch(self) -> None:
        level, seen, total = [self.name], {self.name}, 0
        for _ in range(_LEVELS):
            after: list[str] = []
            for name in level:
                total += len(self._piece(name))
                if total > self.limits.size:
                    raise Malformed(
                        f"the reply has more than {self.limits.size} bytes, which its task allows"
                    )
                for child in self._children(name):
                    if child not in seen:
                        seen.add(child)
                        after.append(child)
                if len(seen) > self.limits.objects:
                    raise Malformed(
                        f"the reply has more than {self.limits.objects} objects, which its task allows"
                    )
            level = after
        if level:
            raise Malformed(f"the reply is nested more than {_LEVELS} levels deep")

    def _measure(self) -> None:
        """Check the lengths of the arrays before memory is taken. A chunk may be in an array several times,
        for example where all is zero."""
        total = 0
        for name in [name for name in self.pieces if self._kind(name) == "Array"]:
            chunks = self._children(name)
            order = json.loads(self._body(name))["arraychunk_ids"]
            if not isinstance(order, list) or not all(
                type(place) is int and 0 <= place < len(chunks) for place in order
            ):
                raise Malformed("an array does not say what it is made of")
            total += sum(len(self.pieces[chunks[place]]) for place in order)
        if total > self.limits.size:
            raise Malformed(
                f"the reply has arrays of {total} bytes, its task allows {self.limits.size} in all"
            )

    def _piece(self, name: str) -> bytes:
        """Fetch an object and check it: its digest is its name, and only a chunk may be large."""
        if name not in self.pieces:
            if not is_valid_sha256_hash(name):
                raise Malformed("the reply names an object that has no digest for a name")
            content = self.source.piece(name)
            if hashlib.sha256(content).hexdigest() != name:
                raise Malformed("the reply has an object that is not its digest's")
            if len(content) > _SMALL and not content.startswith(_CHUNK.encode() + b" "):
                raise Malformed(f"the reply has an object of {len(content)} bytes beside its arrays")
            self.pieces[name] = content
        return self.pieces[name]

    def _small(self, name: str) -> bytes:
        content = self._piece(name)
        if len(content) > _SMALL:
            raise ValueError(f"an envelope of {len(content)} bytes")
        return content

    def _head(self, name: str) -> tuple[str, list[str], int]:
        content = self._piece(name)
        return get_object_head_values_from_object_content(content[: _SMALL + 1])

    def _kind(self, name: str) -> str:
        return self._head(name)[0]

    def _children(self, name: str) -> list[str]:
        return self._head(name)[1]

    def _body(self, name: str) -> bytes:
        return self._small(name).partition(b"\x00")[2]


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {in_print(str(error))[:100]}"
