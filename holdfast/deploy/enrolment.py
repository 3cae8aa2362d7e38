"""The clients of a federation: client numbers bound to public keys, and which clients are banned or have
left. All of it is computed from the ledger, which is the only record.

    enrol, rotate      client, what.key      this client's public key (OpenSSH or PEM) from now on
    leave              client                the client may come back, with a new key
    ban, unban         client, what.reason, what.by (method, strikes, operator)
    strike             client, round, what.reason

Two kinds of entries concern the ledger itself: `server-key` (what.key signs its heads from now on) and
`reset` (the operator has accepted that entries are lost)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from holdfast.core.errors import ConfigError, RunError
from holdfast.deploy.keys import read_public
from holdfast.deploy.ledger import Entry


def fingerprint_of(key: bytes | str) -> str:
    """Return the fingerprint of a public key, however it is written."""
    return hashlib.sha256(
        read_public(key).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    ).hexdigest()


@dataclass
class Member:
    """One client that was ever enrolled."""

    client: int
    key: str
    """As it was enrolled."""
    fingerprint: str
    banned: str | None = None
    left: bool = False
    strikes: list[str] = field(default_factory=list)


@dataclass
class Enrolment:
    """All clients that were ever enrolled, as of some entries of the ledger."""

    members: dict[int, Member] = field(default_factory=dict)
    former: dict[str, int] = field(default_factory=dict)
    """Fingerprints that were replaced, and the clients that had them: they are rejected, and no other client
    may enrol with one."""

    @staticmethod
    def of(entries: Iterable[Entry]) -> Enrolment:
        out = Enrolment()
        for entry in entries:
            out.apply(entry)
        return out

    def apply(self, entry: Entry) -> None:
        """Update the members by one entry."""
        if entry.client is None:
            return
        if entry.kind in ("enrol", "rotate"):
            try:
                self._bind(entry.client, str(entry.what["key"]))
            except ConfigError as error:
                line = f"line {entry.number + 1} enrols client {entry.client}"
                raise RunError(f"the ledger is damaged: {line} with a key that is {error}") from None
        member = self.members.get(entry.client)
        if member is None:
            return
        if entry.kind == "ban":
            member.banned = member.banned or str(entry.what.get("reason", ""))
        elif entry.kind == "unban":
            member.banned, member.strikes = None, []
        elif entry.kind == "strike":
            member.strikes.append(str(entry.what.get("reason", "")))
        elif entry.kind == "leave":
            member.left = True

    def _bind(self, client: int, key: str) -> None:
        fingerprint = fingerprint_of(key)
        before = self.members.get(client)
        if before is not None and before.fingerprint != fingerprint:
            self.former[before.fingerprint] = client
        # A new key does not remove a ban or strikes.
        banned, strikes = (before.banned, before.strikes) if before is not None else (None, [])
        self.members[client] = Member(client, key, fingerprint, banned, False, strikes)

    def check_new(self, client: int, key: str) -> str:
        """Return the fingerprint of a key that may be bound to this client; raise an error if it may not."""
        fingerprint = fingerprint_of(key)
        owner = next(
            (m.client for m in self.members.values() if m.fingerprint == fingerprint),
            self.former.get(fingerprint),
        )
        if owner is not None and (owner != client or fingerprint in self.former):
            raise ConfigError(
                f"client {client}: this key belongs or belonged to client {owner}; make a new one"
            )
        return fingerprint

    def client_of(self, key: bytes | str) -> int | None:
        """Return the client that has this key now; None for an unknown, replaced or unreadable key."""
        try:
            fingerprint = fingerprint_of(key)
        except ConfigError:
            return None
        return next((m.client for m in self.members.values() if m.fingerprint == fingerprint), None)

    def replaced(self, key: bytes | str) -> int | None:
        """Return the client that had this key before it got another."""
        try:
            return self.former.get(fingerprint_of(key))
        except ConfigError:
            return None

    @property
    def banned(self) -> Mapping[int, str]:
        """Banned clients and the reasons."""
        return {m.client: m.banned for m in self.members.values() if m.banned is not None}

    @property
    def admitted(self) -> set[int]:
        """Clients that may take part: enrolled, not banned, and have not left."""
        return {m.client for m in self.members.values() if m.banned is None and not m.left}
