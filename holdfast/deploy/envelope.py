"""The signed envelope of every message: its sender, its receiver, its subject, and the digests of its
records.

The server signs its orders with server/orders.key, and a node performs nothing else: Flower passes on to a
node whatever reaches the SuperLink. A node signs its replies with the key that it is enrolled with. The
server reads only replies that are signed so, and only those can lead to a strike: what Flower reports about a
sender is the sender's own claim.

The signed text is one line of JSON with sorted keys. For an order: client, nonce, time of expiry, head of the
ledger, digests. For a reply: run, round, step, task, client, nonce, digests. A digest is Flower's object id
of a record, the SHA-256 over its content and the ids of its parts, so it is checked before any of the payload
is fetched or parsed. This file does not import torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, RecordDict

from holdfast.core.errors import RunError
from holdfast.core.files import lock, unlock, write_atomically, write_json
from holdfast.core.reading import is_whole, parse_json, read_json, read_whole
from holdfast.deploy import keys
from holdfast.deploy.server_keys import Link, parse_links, successor
from holdfast.deploy.server_memory import HEAD, ServerMemory

ENVELOPE = "post"
"""The record of a message that holds its envelope; all others are its payload."""
_ORDER, _REPLY = "holdfast order 1", "holdfast reply 1"
_CLOCKS = 30.0  # seconds by which the clocks of two machines may differ
_PUBLIC = 4096  # bytes of a public key
_SIGNATURE = 512  # characters


class Unsigned(RunError):
    """A message whose sender is not the required one. It is not held against any client."""


@dataclass(frozen=True)
class Subject:
    """What a reply is about; its signature names all of it."""

    run: str
    round: int
    step: int
    task: str
    client: int


def digests_of(content: RecordDict) -> dict[str, str]:
    """Return the digests of all records but the envelope."""
    return {name: record.object_id for name, record in content.items() if name != ENVELOPE}


def sign_order(
    content: RecordDict, key: ec.EllipticCurvePrivateKey, client: int, nonce: str, seconds: float, head: str
) -> None:
    """Sign an order that is valid for so many seconds. `head` is the signed head of the ledger, which the
    node keeps as evidence."""
    expires = time.time() + seconds
    signature = keys.sign(key, _ORDER, _order(content, client, nonce, expires, head))
    content[ENVELOPE] = ConfigRecord(
        {"nonce": nonce, "expires": expires, "head": head, "signature": signature.hex()}
    )


def _order(content: RecordDict, client: int, nonce: str, expires: float, head: str) -> bytes:
    return _line(client=client, nonce=nonce, expires=expires, head=head, records=digests_of(content))


def is_signed_reply(
    public: str, signature: object, subject: Subject, nonce: str, digests: Mapping[str, str]
) -> bool:
    """Return whether the owner of this key has signed a reply about this subject, with exactly these
    records."""
    return keys.verify(public, _REPLY, _reply(subject, nonce, digests), _bytes(signature))


def _reply(subject: Subject, nonce: str, digests: Mapping[str, str]) -> bytes:
    return _line(**asdict(subject), nonce=nonce, records=dict(digests))


def _bytes(signature: object) -> bytes:
    """Decode a signature from text; anything else becomes an empty one, which is never valid."""
    try:
        return (
            bytes.fromhex(signature) if isinstance(signature, str) and len(signature) <= _SIGNATURE else b""
        )
    except ValueError:
        return b""


def _line(**about: Any) -> bytes:
    return json.dumps(about, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class NodeSigner:
    """The node's side: checks orders by the server's public key and signs replies with its own private
    key."""

    client: int
    server: str
    key: ec.EllipticCurvePrivateKey
    state: Path
    server_file: Path | None = None
    """Where the server's key is kept: a new one that the old one has signed replaces it."""

    @staticmethod
    def of(settings: Mapping[str, Any]) -> NodeSigner | None:
        """Build it from the settings of the SuperNode; return None in a trial without keys."""
        if "key" not in settings:
            return None
        server = Path(str(settings["server-key"]))
        if not server.exists():
            raise RunError(
                f"{server} is missing, so no order can be checked; `holdfast federation enrol` on the server"
                " writes it"
            )
        key = keys.load_private(Path(str(settings["key"])))
        return NodeSigner(
            int(settings["client-id"]),
            read_whole(server, _PUBLIC).decode(),
            key,
            Path(str(settings["state-dir"])),
            server,
        )

    def check(self, content: RecordDict) -> None:
        """Raise Unsigned unless the server has signed this order, for this client, and it was not performed
        before."""
        record = content.get(ENVELOPE)
        envelope = dict(record) if isinstance(record, ConfigRecord) else {}
        nonce, expires, head, signature = (
            envelope.get(name) for name in ("nonce", "expires", "head", "signature")
        )
        if not (isinstance(nonce, str) and type(expires) is float and isinstance(head, str)):
            raise Unsigned("rejected an order without a complete envelope")
        self._verify(_order(content, self.client, nonce, expires, head), _bytes(signature), head)
        if expires + _CLOCKS < time.time():
            raise Unsigned("rejected an order that has expired; check the clock of this machine")
        self._once(nonce, expires)
        ServerMemory(self.state).check(head, *_run_and_round(content))

    def _verify(self, order: bytes, signature: bytes, head: str) -> None:
        """Raise Unsigned unless the server has signed this, with the key that is known here or with one that
        this key leads to. That one is kept from then on."""
        if keys.verify(self.server, _ORDER, order, signature):
            return
        new = successor(self.server, _links(head))
        if new == self.server or not keys.verify(new, _ORDER, order, signature):
            raise Unsigned("rejected an order that the server did not sign for this client")
        if self.server_file is not None:
            write_atomically(self.server_file, (new + "\n").encode())
            print("the server has a new key, signed with the one before; it is kept", file=sys.stderr)

    def sign(self, content: RecordDict, subject: Subject) -> None:
        """Sign a reply, which repeats the order's nonce already."""
        record = content[ENVELOPE]
        assert isinstance(record, ConfigRecord)
        nonce = str(record["nonce"])
        signature = keys.sign(self.key, _REPLY, _reply(subject, nonce, digests_of(content)))
        content[ENVELOPE] = ConfigRecord({"nonce": nonce, "signature": signature.hex()})

    def _once(self, nonce: str, expires: float) -> None:
        """Reject an order that was performed before: it would be noised anew and use up privacy budget."""
        self.state.mkdir(parents=True, exist_ok=True)
        file, held = self.state / "orders.json", lock(self.state / "orders.lock", wait=True)
        assert held is not None
        try:
            now, before = time.time(), read_json(file) or {}
            if nonce in before:
                raise Unsigned("rejected an order that was performed before")
            current = {
                name: until
                for name, until in before.items()
                if isinstance(until, float) and until + 2 * _CLOCKS > now
            }
            write_json(file, {**current, nonce: expires})
        finally:
            unlock(held)


def _run_and_round(content: RecordDict) -> tuple[str, int]:
    """Return the run of an order and the round that is committed before it."""
    record = content.get("header")
    header = dict(record) if isinstance(record, ConfigRecord) else {}
    run, committed = header.get("run"), header.get("committed")
    if not isinstance(run, str) or not isinstance(committed, int) or not is_whole(committed):
        return "", 0
    return run, committed


def _links(head: str) -> list[Link]:
    """Return the changes of the server's key that a signed head carries; none if it cannot be read."""
    try:
        content = parse_json(head) if len(head) <= HEAD else None
        return parse_links(content.get("keys", [])) if isinstance(content, dict) else []
    except ValueError:
        return []
