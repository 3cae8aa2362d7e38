"""One reply, fetched from the SuperLink piece by piece and bounded at every piece. Flower's own pull fetches
whatever was announced and builds it before anybody can look: an array may name one chunk a thousand times, so
that 5 MB become gigabytes.

Here the envelope comes first: message, table of records and envelope are small or refused. What the envelope
does not prove to be the receiver's is dropped. Then the payload is followed from record to record, each piece
checked against its digest, until more pieces, more bytes or more levels come than the task's schema allows;
and the arrays are put together only when their lengths are known.

This file and flower.py are the only ones that use what Flower keeps to itself (flwr 1.41: the runtime client
of HttpGrid)."""

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
    """What came over the wire is not what was agreed; the message says what is wrong."""


class NotProven(Exception):
    """It cannot be shown who sent this; the message says why."""


class NotThere(Exception):
    """A piece that was announced has not arrived yet."""


class NeverComes(Exception):
    """A piece that was announced will not arrive any more."""


@dataclass(frozen=True)
class ReplyLimits:
    """What a reply may consist of: objects, bytes in all, and bytes of the arrays once they are put
    together."""

    objects: int
    size: int


class Source(Protocol):
    """Where replies are; see `SuperLinkSource`."""

    def announced(self, letter: str) -> Any:
        """What the SuperLink says of the reply to this message (flwr's Message proto); None before it is
        there."""
        ...

    def piece(self, name: str) -> bytes: ...

    def confirm(self, name: str) -> None: ...


class SuperLinkSource:
    """The SuperLink, through the client that Flower's grid has."""

    def __init__(self, grid: Any):
        self.grid = grid

    def announced(self, letter: str) -> Any:
        """One letter at a time: the SuperLink forgets a reply when it hands it over, so an answer of its own
        that is lost on the way costs that one reply. Messages that reply to nothing, or to something else,
        may come along: they belong to nobody."""
        said = self.grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=[letter]))
        return next(
            (message for message in said.messages_list if message.metadata.reply_to_message_id == letter),
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
"""Given an envelope and the digests of the other records, raises NotProven unless they are the receiver's."""


@dataclass
class Reply:
    """A reply that was announced. `read` goes on where it stopped when a piece was not there."""

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
        # Flower's parsers were not written for malice: they fail in many ways, and only the sender pays
        except Exception as error:
            raise Malformed(f"unreadable reply ({_short(error)})") from None
        if not isinstance(made, RecordDict):
            raise Malformed("the reply is no table of records")
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
        """Before memory is taken: how long the arrays will be. A chunk may stand in an array several times,
        honestly where all is zero."""
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
        """What is not a chunk is small; what is not its name's is nothing."""
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
