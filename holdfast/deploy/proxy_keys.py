"""Identifies the node that sends a request by its headers alone: Flower's nodes sign the time with their key.
So a body is read only for registered keys; an unauthenticated request costs only the parsing of its
headers."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

from holdfast.core.errors import ConfigError, RunError
from holdfast.core.reading import read_json
from holdfast.deploy.enrolment import fingerprint_of

_KEY, _SIGNATURE, _TIME = (
    name.encode() for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
)
_LONGEST = 1000  # bytes of one of these headers: those of the largest curve have about 400


@dataclass(frozen=True)
class Node:
    """A registered node."""

    fingerprint: str
    number: int
    """Its id at the SuperLink."""
    key: bytes
    """As Flower writes it."""
    public: ec.EllipticCurvePublicKey


class Keys:
    """The keys that the SuperLink knows, from registered.json: {fingerprint: node, or "" for one that is no
    longer admitted}. `up` replaces that file whenever it changes, so it is checked before every request, and
    a new node is accepted at once."""

    def __init__(self, registered: Path):
        self.registered = registered
        self.seen: tuple[int, int] | None = None
        self.numbers: dict[str, int] = {}
        self.read: dict[bytes, Node] = {}  # registered keys only, so it is bounded

    def authenticate(self, headers: Mapping[bytes, bytes]) -> Node | None:
        """Return the node; None without a key, for an unknown or banned key, or for a signature that is not
        valid or not current."""
        self._refresh()
        spelled = headers.get(_KEY, b"")
        node = self.read.get(spelled) or self._load(spelled)
        if node is None or not _signed_now(
            node.public, headers.get(_TIME, b""), headers.get(_SIGNATURE, b"")
        ):
            return None
        return node

    def _refresh(self) -> None:
        try:
            about = self.registered.stat()
            now: tuple[int, int] | None = (about.st_mtime_ns, about.st_ino)
        except OSError:
            now = None
        if now == self.seen:
            return
        try:
            known = (read_json(self.registered) or {}) if now is not None else {}
        except RunError:  # unreadable: every node is rejected, and `up` reports the error
            known = {}
        self.numbers = {
            str(name): int(number)
            for name, number in known.items()
            if isinstance(number, str) and number.isdigit()
        }
        self.seen, self.read = now, {}

    def _load(self, spelled: bytes) -> Node | None:
        try:
            if len(spelled) > _LONGEST:
                return None
            key = base64.b64decode(spelled, validate=True)
            fingerprint = fingerprint_of(key)
            if fingerprint not in self.numbers:
                return None
            node = Node(fingerprint, self.numbers[fingerprint], key, bytes_to_public_key(key))
        except (ValueError, ConfigError):
            return None
        if len(self.read) >= 4 * len(self.numbers):  # base64 spells one key in several ways
            self.read = {}
        self.read[spelled] = node
        return node


def _signed_now(key: ec.EllipticCurvePublicKey, time: bytes, signature: bytes) -> bool:
    """Check the signature as the SuperLink does, which checks it again with the whole request."""
    try:
        if max(len(time), len(signature)) > _LONGEST:
            return False
        age = (
            datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(time.decode("ascii"))
        ).total_seconds()
        fresh = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        return fresh and verify_signature(key, time, base64.b64decode(signature, validate=True))
    except (ValueError, TypeError, OverflowError):
        return False
