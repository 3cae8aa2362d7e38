"""The signed envelope of every message: who wrote it, to whom, about what, and the digests of all that it
carries.

The server signs its orders with server/orders.key, and a node carries out nothing else: Flower hands a node
whatever reaches the SuperLink. A node signs its replies with the key that it is enrolled with, and the server
reads, and holds against a client, only what is signed so: what Flower says of a sender is the sender's own
claim.

Signed is one line of JSON with sorted keys. Of an order: client, nonce, time of expiry, head of the ledger,
digests. Of a reply: run, round, step, task, client, nonce, digests. A digest is Flower's object id of a
record, the SHA-256 over its content and over the ids of what it is made of, so it is checked before any of
the payload is fetched or parsed. No torch in this file."""

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
from holdfast.core.files import (
    is_whole,
    lock,
    parse_json,
    read_json,
    read_whole,
    unlock,
    write_atomically,
    write_json,
)
from holdfast.deploy import keys

ENVELOPE = "post"
"""The record of a message that holds its envelope; all others are its payload."""
_ORDER, _REPLY = "holdfast order 1", "holdfast reply 1"
_CLOCKS = 30.0  # seconds by which the clocks of two machines may differ
_HEAD = 4096  # bytes of a signed head of the ledger
_SIGNATURE = 512  # letters


class Unsigned(RunError):
    """A message that is not from whom it must be. Nobody can be blamed for it."""


@dataclass(frozen=True)
class Subject:
    """What a reply is about; its signature names all of it."""

    run: str
    round: int
    step: int
    task: str
    client: int


def digests_of(content: RecordDict) -> dict[str, str]:
    return {name: record.object_id for name, record in content.items() if name != ENVELOPE}


def sign_order(
    content: RecordDict, key: ec.EllipticCurvePrivateKey, client: int, nonce: str, seconds: float, head: str
) -> None:
    """Close an order that is good for so many seconds. `head` is the signed head of the ledger, which the
    node keeps as a witness."""
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
    """Whether the owner of this key has signed a reply about this, with exactly these records."""
    return keys.verify(public, _REPLY, _reply(subject, nonce, digests), _bytes(signature))


def _reply(subject: Subject, nonce: str, digests: Mapping[str, str]) -> bytes:
    return _line(**asdict(subject), nonce=nonce, records=dict(digests))


def _bytes(signature: object) -> bytes:
    """A signature travels as text; what is none is an empty one, which is nobody's."""
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
    """A node's side: it checks orders by the server's public key and signs replies with its own private
    key."""

    client: int
    server: str
    key: ec.EllipticCurvePrivateKey
    state: Path

    @staticmethod
    def of(settings: Mapping[str, Any]) -> NodeSigner | None:
        """From the settings of the SuperNode; None in a trial without keys."""
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
            read_whole(server, _HEAD).decode(),
            key,
            Path(str(settings["state-dir"])),
        )

    def check(self, content: RecordDict) -> None:
        """Before anything is done: the server has signed this order, for this client, and it is not an old
        one again."""
        record = content.get(ENVELOPE)
        said = dict(record) if isinstance(record, ConfigRecord) else {}
        nonce, expires, head, signature = (
            said.get(name) for name in ("nonce", "expires", "head", "signature")
        )
        if not (isinstance(nonce, str) and type(expires) is float and isinstance(head, str)):
            raise Unsigned("an order without a complete envelope was rejected")
        if not keys.verify(
            self.server, _ORDER, _order(content, self.client, nonce, expires, head), _bytes(signature)
        ):
            raise Unsigned("an order that the server did not sign for this client was rejected")
        if expires + _CLOCKS < time.time():
            raise Unsigned("an order that has expired was rejected; is the clock of this machine right?")
        self._once(nonce, expires)
        self._keep_head(head)

    def sign(self, content: RecordDict, subject: Subject) -> None:
        """Close a reply, which repeats the order's nonce already."""
        record = content[ENVELOPE]
        assert isinstance(record, ConfigRecord)
        nonce = str(record["nonce"])
        signature = keys.sign(self.key, _REPLY, _reply(subject, nonce, digests_of(content)))
        content[ENVELOPE] = ConfigRecord({"nonce": nonce, "signature": signature.hex()})

    def _once(self, nonce: str, expires: float) -> None:
        """An order that is carried out again would be noised anew, and be paid for from the privacy
        budget."""
        self.state.mkdir(parents=True, exist_ok=True)
        file, held = self.state / "orders.json", lock(self.state / "orders.lock", wait=True)
        assert held is not None
        try:
            now, before = time.time(), read_json(file) or {}
            if nonce in before:
                raise Unsigned("an order that was carried out before was rejected")
            current = {
                name: until
                for name, until in before.items()
                if isinstance(until, float) and until + 2 * _CLOCKS > now
            }
            write_json(file, {**current, nonce: expires})
        finally:
            unlock(held)

    def _keep_head(self, head: str) -> None:
        """The longest ledger that the server has shown is kept, so that a shorter one is noticed, here and by
        `verify --head`."""
        file, shown = self.state / "ledger.head", _entries(head)
        kept = _entries(read_whole(file, _HEAD).decode(errors="replace")) if file.exists() else 0
        if shown and shown >= kept:
            write_atomically(file, head.encode())
        elif shown:
            print(
                f"the server's ledger has {shown} entries and had {kept}: lines are gone; {file} proves what"
                " was there",
                file=sys.stderr,
            )


def _entries(head: str) -> int:
    """How long the ledger is by a signed head; 0 where it says nothing."""
    try:
        content = parse_json(head) if len(head) <= _HEAD else None
    except ValueError:
        content = None
    entries = content.get("entries") if isinstance(content, dict) else None
    return entries if is_whole(entries) and isinstance(entries, int) else 0
