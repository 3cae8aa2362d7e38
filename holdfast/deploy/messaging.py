"""Requests to nodes and their replies, matched by message id.

Each request is pulled by its own message id, its reply must name that id and repeat a nonce that only the
request's receiver has seen, and where clients have keys it must be signed by the receiver. What cannot be
attributed is dropped, counted and logged, and not held against any client. This file does not import torch: a
client that only states its id should not load it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log

from holdfast.core.errors import in_print
from holdfast.core.files import as_json, replace_file
from holdfast.deploy.envelope import ENVELOPE, Subject, is_signed_reply, sign_order
from holdfast.deploy.notices import POSTED, Notices
from holdfast.deploy.replies import (
    Malformed,
    NeverComes,
    NotProven,
    NotThere,
    Reply,
    ReplyLimits,
    Source,
    SuperLinkSource,
)

if TYPE_CHECKING:
    from flwr.serverapp import Grid

# a request outlives its deadline a little, so that a reply at the last moment is not lost to clocks that
# differ
_SLACK = 30.0
_EVERY = 5.0  # seconds between two looks at all replies that are waited for


@dataclass
class Request:
    """A request to one node. `read` turns the content of the reply into the answer, or raises Malformed;
    `limits` are those of the task's schema."""

    content: RecordDict
    read: Callable[[RecordDict], Any]
    limits: ReplyLimits
    deadline: float
    subject: Subject | None = None
    """The subject of order and reply, where they are signed."""
    key: str = ""
    """The public key of the receiver."""


@dataclass
class Replies:
    """The outcome of some requests, by node: answers, faults of the sender, missing replies with the reason;
    and after how many seconds."""

    answers: dict[int, Any] = field(default_factory=dict)
    malformed: dict[int, str] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    """Missing nodes that the server waited for until their deadline."""
    seconds: dict[int, float] = field(default_factory=dict)


@dataclass
class _PendingRequest:
    """A request that was sent and not answered yet."""

    node: int
    nonce: str
    request: Request
    found: Any = None
    reply: Reply | None = None


@dataclass
class Messaging:
    """Sends requests over Flower's grid and reads the replies."""

    grid: Grid
    poll: float = 0.2
    """Seconds between two checks for replies; Flower's own send_and_receive waits three."""
    key: ec.EllipticCurvePrivateKey | None = None
    """Signs the orders; None in a trial without keys."""
    head: Callable[[], str] = lambda: ""
    """The signed head of the ledger, which every order carries."""
    mark: Path | None = None
    """A file that names the client whose reply is being read: if a reply kills this process, its sender is
    known afterwards."""
    notices: Notices | None = None
    """Tells which request has been answered, where there is a proxy that says so; otherwise all are asked for
    several times a second."""
    unproven: int = 0
    """Number of replies that were dropped because their sender could not be proven."""

    def __post_init__(self) -> None:
        self.source: Source = SuperLinkSource(self.grid)

    def ask(self, kind: str, requests: Mapping[int, Request]) -> Replies:
        """Send one request to each node; what has not come back by its deadline is missing."""
        replies, waiting = Replies(), self._send(kind, requests)
        began = time.monotonic()  # sending does not count against the clients
        sent = {one.node for one in waiting.values()}
        replies.missing = {node: "could not be sent" for node in requests if node not in sent}
        due = set(waiting)
        self._again = began + _EVERY
        while waiting:
            for name, one in list(waiting.items()):
                # Taken before the check: a reply that comes while others are read is checked once more.
                passed = time.monotonic() - began
                over = passed >= one.request.deadline
                if (over or name in due) and self._is_announced(name, one) and self._collect(one, replies):
                    replies.seconds[one.node] = passed
                    del waiting[name]
                elif over:
                    what = (
                        "its answer was announced and did not come" if one.reply is not None else "no answer"
                    )
                    replies.missing[one.node] = f"{what} within {one.request.deadline:g} s"
                    replies.late.add(one.node)
                    del waiting[name]
            if waiting:
                due = self._wait(waiting, began)
        return replies

    def _wait(self, waiting: Mapping[str, _PendingRequest], began: float) -> set[str]:
        """Wait a little, and return the requests whose replies may be there. A notice may be lost, and an
        error that the SuperLink itself reports has none, so all are due every few seconds."""
        if self.notices is None:
            time.sleep(self.poll)
            return set(waiting)
        begun = {name for name, one in waiting.items() if one.found is not None}
        first = min(began + one.request.deadline for one in waiting.values())
        last = time.monotonic() + self.poll if begun else min(self._again, first)
        named = set(self.notices.wait(last - time.monotonic()))
        if time.monotonic() < self._again:
            return begun | named & set(waiting)
        self._again = time.monotonic() + _EVERY
        return set(waiting)

    def _send(self, kind: str, requests: Mapping[int, Request]) -> dict[str, _PendingRequest]:
        """Send the requests; return them by message id. The nonce makes every message, and so its id,
        unique."""
        messages, table = [], []
        head = self.head() if self.key is not None else ""
        for node, request in requests.items():
            nonce, good_for = secrets.token_hex(16), request.deadline + _SLACK
            request.content[ENVELOPE] = ConfigRecord({"nonce": nonce})
            if self.key is not None:
                assert request.subject is not None
                sign_order(request.content, self.key, request.subject.client, nonce, good_for, head)
            messages.append(Message(request.content, node, kind, ttl=good_for))
            table.append(_PendingRequest(node, nonce, request))
        ids = list(self.grid.push_messages(messages)) if messages else []
        if self.notices is not None:
            self.notices.send(POSTED)
        for one in table:
            one.request.content = RecordDict()  # frees the model that was sent
        return {name: one for name, one in zip(ids, table, strict=False) if name}

    def _is_announced(self, name: str, one: _PendingRequest) -> bool:
        """Return whether the reply is announced."""
        if one.found is None:
            try:
                one.found = self.source.announced(name)
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500:
                    raise
                # The SuperLink is busy, or fails on this request: it is asked again until the deadline.
                return False
            if one.found is not None and not one.found.HasField("error"):
                one.reply = Reply(self.source, one.found.metadata.message_id, one.request.limits)
        return one.found is not None

    def _collect(self, one: _PendingRequest, replies: Replies) -> bool:
        """Read one announced reply; return True when there is nothing more to wait for. Each is read alone,
        so an unreadable one affects only its sender."""
        node = one.node
        if one.reply is None:
            replies.missing[node] = f"error {one.found.error.code}: {in_print(one.found.error.reason)[:200]}"
            return True
        try:
            one.reply.prove(lambda envelope, digests: self._prove(one, envelope, digests))
            replies.answers[node] = self._read(one.reply, one.request)
        except NotThere:  # the rest may come later; others are read meanwhile
            return False
        except NeverComes:
            replies.missing[node] = "its answer was announced and did not come"
        except NotProven as error:
            self.unproven += 1
            log(WARNING, "dropped a reply that cannot be attributed (%d so far): %s", self.unproven, error)
            replies.missing[node] = f"a reply that cannot be attributed: {error}"
        except Malformed as error:
            replies.malformed[node] = str(error)
        except httpx.HTTPStatusError as error:
            if error.response.status_code >= 500:
                return False
            raise
        self._confirm(one.reply.name)
        return True

    def _prove(self, one: _PendingRequest, envelope: ConfigRecord, digests: dict[str, str]) -> None:
        nonce, subject = envelope.get("nonce"), one.request.subject
        if not isinstance(nonce, str) or not secrets.compare_digest(nonce.encode(), one.nonce.encode()):
            raise NotProven("wrong nonce")
        signed = subject is not None and is_signed_reply(
            one.request.key, envelope.get("signature"), subject, nonce, digests
        )
        if self.key is not None and not signed:
            raise NotProven("it is not signed with the client's key")

    def _read(self, reply: Reply, request: Request) -> Any:
        """Read a proven reply. From here on any fault is the sender's."""
        if self.mark is not None and request.subject is not None:
            replace_file(self.mark, as_json(asdict(request.subject)))
        try:
            return request.read(reply.read())
        finally:
            if self.mark is not None:
                self.mark.unlink(missing_ok=True)

    def _confirm(self, name: str) -> None:
        """Allow the SuperLink to forget a reply."""
        try:
            self.source.confirm(name)
        except httpx.HTTPError:  # it forgets by itself when the run ends
            pass


def answer(content: RecordDict, message: Message) -> Message:
    """Return a client's reply, which repeats the request's nonce."""
    content[ENVELOPE] = ConfigRecord({"nonce": config_record(message.content, ENVELOPE)["nonce"]})
    return Message(content, reply_to=message)


def pack_client(client: int) -> RecordDict:
    return RecordDict({"client": ConfigRecord({"client": client})})


def read_client(content: RecordDict, clients: int) -> int:
    """Return the client id that a node states."""
    expect_names("records", set(content), {"client", ENVELOPE})
    client = config_record(content, "client").get("client")
    if type(client) is not int or not 0 <= client < clients:
        raise Malformed(f"client id {in_print(str(client)[:40])}, expected 0 to {clients - 1}")
    return client


def expect_names(what: str, sent: set[str], expected: set[str]) -> None:
    if sent != expected:
        raise Malformed(f"{what} {_few(sent)}, expected {_few(expected)}")


def _few(names: set[str]) -> str:
    """Shorten names for logs: a sender may write anything into them."""
    return ", ".join(in_print(name[:40]) for name in sorted(names)[:8]) or "none"


def config_record(content: RecordDict, name: str) -> ConfigRecord:
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise Malformed(f"record '{name}' is not a table of settings")
    return record
