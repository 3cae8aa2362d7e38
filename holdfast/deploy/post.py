"""Letters to nodes and their answers: Flower's push and pull with a table of our own.

A reply's sender, and what it answers, are written by the sender itself, so neither is believed: each letter is pulled by its own message
id, which the SuperLink checks, and its reply must repeat a nonce that only the receiver of that letter has seen. No torch in this file: a
client that only says who it is should not load it."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import TYPE_CHECKING

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log

from holdfast.core.errors import in_print

if TYPE_CHECKING:
    from flwr.serverapp import Grid

POST = "post"
"""The record of a message that belongs to this file."""
_QUICK = 0.5  # seconds that a look for a reply may take before the others are looked for meanwhile
_SLACK = 30.0  # a letter outlives its deadline a little, so that a reply at the last moment is not lost to clocks that differ


class Malformed(ValueError):
    """Something that came over the wire is not what was agreed; the message says what."""


@dataclass
class Mail:
    """What came of some letters, by node: contents, faults of the sender, and silence with its reason (too late, gone, failed)."""

    answers: dict[int, RecordDict] = field(default_factory=dict)
    malformed: dict[int, str] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)


@dataclass
class Post:
    grid: Grid
    poll: float = 0.2
    """Seconds between two looks for replies; Flower's own send_and_receive waits three."""

    def ask(self, kind: str, letters: Mapping[int, RecordDict], deadline: float) -> Mail:
        """One letter to each node; what has not come back after `deadline` seconds is missing."""
        mail, waiting = Mail(), self._send(kind, letters, deadline)
        mail.missing = {node: "could not be sent" for node in letters if node not in {node for node, _ in waiting.values()}}
        slow: dict[str, _Look] = {}
        end = time.monotonic() + deadline
        while waiting and time.monotonic() < end:
            for letter in list(waiting):
                look = slow.get(letter) or _Look(self.grid, letter)
                if look.goes_on(0 if letter in slow else _QUICK):
                    slow[letter] = look
                    continue
                slow.pop(letter, None)
                if self._collect(look, *waiting[letter], mail):
                    del waiting[letter]
            if waiting:
                time.sleep(self.poll)
        mail.missing |= {node: f"no answer within {deadline:g} s" for node, _ in waiting.values()}
        return mail

    def _send(self, kind: str, letters: Mapping[int, RecordDict], deadline: float) -> dict[str, tuple[int, str]]:
        """Message ids, each with its node and nonce. The nonce also makes every message, and so its id, unlike any other."""
        messages, table = [], []
        for node, content in letters.items():
            nonce = secrets.token_hex(16)
            content[POST] = ConfigRecord({"nonce": nonce})
            messages.append(Message(content, node, kind, ttl=deadline + _SLACK))
            table.append((node, nonce))
        ids = list(self.grid.push_messages(messages)) if messages else []
        return {letter: entry for letter, entry in zip(ids, table, strict=False) if letter}

    def _collect(self, look: _Look, node: int, nonce: str, mail: Mail) -> bool:
        """What a look has found; true when the reply is there. Each is pulled alone, so that one that cannot be read costs only its
        sender."""
        if isinstance(look.error, httpx.HTTPStatusError) and look.error.response.status_code >= 500:
            return False  # the SuperLink stumbles over this letter, or is busy: asked again until the deadline, and nobody's fault
        if isinstance(look.error, httpx.HTTPError):  # the SuperLink itself cannot be reached: nobody's fault but the network's
            raise look.error
        try:
            if look.error is not None:
                raise look.error
            if not look.replies:
                return False
            self._sort(look.replies[0], look.letter, node, nonce, mail)
        except Exception as error:  # whatever Flower stumbles over while it unpacks what a node has sent
            mail.malformed[node] = f"unreadable reply ({type(error).__name__}: {in_print(str(error))[:100]})"
        return True

    @staticmethod
    def _sort(reply: Message, letter: str, node: int, nonce: str, mail: Mail) -> None:
        if reply.has_error():
            mail.missing[node] = f"error {reply.error.code}: {in_print(reply.error.reason or '')[:200]}"
        elif reply.metadata.reply_to_message_id != letter or not _repeats(reply.content, nonce):
            log(WARNING, "a reply with a wrong nonce or address was dropped")  # perhaps a forgery, so it is not held against the node
            mail.missing[node] = "wrong nonce"
        else:
            mail.answers[node] = reply.content


class _Look:
    """One look for one reply. In a thread of its own: Flower waits in it, for minutes, for the rest of a reply that was announced, and a
    node that never sends the rest must not hold up everybody else beyond the deadline."""

    def __init__(self, grid: Grid, letter: str):
        self.grid, self.letter = grid, letter
        self.replies: list[Message] = []
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._pull, daemon=True)
        self.thread.start()

    def goes_on(self, seconds: float) -> bool:
        self.thread.join(seconds)
        return self.thread.is_alive()

    def _pull(self) -> None:
        try:
            self.replies = list(self.grid.pull_messages([self.letter]))
        except Exception as error:
            self.error = error


def _repeats(content: RecordDict, nonce: str) -> bool:
    record = content.get(POST)
    said = str(record["nonce"]) if isinstance(record, ConfigRecord) and set(record) == {"nonce"} else ""
    return secrets.compare_digest(said.encode(), nonce.encode())


def answer(content: RecordDict, message: Message) -> Message:
    """The client's side: a reply that repeats the letter's nonce."""
    content[POST] = config_record(message.content, POST)
    return Message(content, reply_to=message)


def pack_client(client: int) -> RecordDict:
    return RecordDict({"client": ConfigRecord({"client": client})})


def read_client(content: RecordDict, clients: int) -> int:
    """The id a node says it has."""
    expect_names("records", set(content), {"client", POST})
    client = config_record(content, "client").get("client")
    if type(client) is not int or not 0 <= client < clients:
        raise Malformed(f"client id {in_print(str(client)[:40])}, expected 0 to {clients - 1}")
    return client


def expect_names(what: str, sent: set[str], expected: set[str]) -> None:
    if sent != expected:
        raise Malformed(f"{what} {_few(sent)}, expected {_few(expected)}")


def _few(names: set[str]) -> str:
    """A sender may write anything into a name: keep what goes into logs short."""
    return ", ".join(in_print(name[:40]) for name in sorted(names)[:8]) or "none"


def config_record(content: RecordDict, name: str) -> ConfigRecord:
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise Malformed(f"record '{name}' is not a table of settings")
    return record
