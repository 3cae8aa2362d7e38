"""Who is who in a federation: client numbers bound to public keys, and who is banned or has left. All of it
is read off the ledger, so that there is one truth and it outlives everything.

    enrol, rotate      client, what.key      the key (an OpenSSH or PEM public key) that this client has from
                       now on
    leave              client                it may come back, with a new key
    ban, unban         client, what.reason, what.by (method, strikes, operator)
    strike             client, round, what.reason

Of the ledger itself: `server-key` (what.key signs its heads from now on) and `reset` (the operator has
accepted that entries are lost)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from holdfast.core.errors import ConfigError, RunError
from holdfast.deploy.keys import read_public
from holdfast.deploy.ledger import Entry


def fingerprint_of(key: bytes | str) -> str:
    """The name of a public key, however it is written."""
    return hashlib.sha256(
        read_public(key).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    ).hexdigest()


@dataclass
class Member:
    client: int
    key: str
    """As it was enrolled."""
    fingerprint: str
    banned: str | None = None
    left: bool = False
    strikes: list[str] = field(default_factory=list)


@dataclass
class Enrolment:
    members: dict[int, Member] = field(default_factory=dict)
    former: dict[str, int] = field(default_factory=dict)
    """Fingerprints that were replaced, and whose they were: nobody gets in with one, and nobody else may
    enrol with one."""

    @staticmethod
    def of(entries: Iterable[Entry]) -> Enrolment:
        out = Enrolment()
        for entry in entries:
            out.take_in(entry)
        return out

    def take_in(self, entry: Entry) -> None:
        if entry.client is None:
            return
        if entry.kind in ("enrol", "rotate"):
            try:
                self._bind(entry.client, str(entry.what["key"]))
            except ConfigError as error:
                who = f"line {entry.number + 1} enrols client {entry.client}"
                raise RunError(f"the ledger is damaged: {who} with a key that is {error}") from None
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
        banned, strikes = (
            (before.banned, before.strikes) if before is not None else (None, [])
        )  # a new key is no new start
        self.members[client] = Member(client, key, fingerprint, banned, False, strikes)

    def check_new(self, client: int, key: str) -> str:
        """The fingerprint of a key that may be bound to this client; an error where it may not."""
        fingerprint = fingerprint_of(key)
        owner = next(
            (m.client for m in self.members.values() if m.fingerprint == fingerprint),
            self.former.get(fingerprint),
        )
        if owner is not None and (owner != client or fingerprint in self.former):
            raise ConfigError(f"client {client}: this key is or was that of client {owner}; make a new one")
        return fingerprint

    def client_of(self, key: bytes | str) -> int | None:
        """Whose key this is now; None for a stranger's, a replaced one, and one that nobody can read."""
        try:
            fingerprint = fingerprint_of(key)
        except ConfigError:
            return None
        return next((m.client for m in self.members.values() if m.fingerprint == fingerprint), None)

    def replaced(self, key: bytes | str) -> int | None:
        """Whose key this was, before it got another."""
        try:
            return self.former.get(fingerprint_of(key))
        except ConfigError:
            return None

    @property
    def banned(self) -> Mapping[int, str]:
        return {m.client: m.banned for m in self.members.values() if m.banned is not None}

    @property
    def welcome(self) -> set[int]:
        return {m.client for m in self.members.values() if m.banned is None and not m.left}
