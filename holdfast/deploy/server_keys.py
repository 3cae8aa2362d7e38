"""The server's key for orders and ledger heads, and its successors.

A new key is signed by the one before. Every signed head carries the last of these signatures, so a node that
knows an earlier key follows them to the current one; nobody else can name a key that it would accept. A node
that has missed more changes than a head carries needs server.pub from the operator."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import RunError
from holdfast.core.files import lock, unlock, write_atomically

if TYPE_CHECKING:
    from holdfast.deploy.ledger import Entry, Ledger

NEXT_KEY = "orders.key.next"
"""Beside the ledger, while the key is replaced."""
LINKS = 6  # changes of the key that a signed head carries: each has about 450 bytes
_CONTEXT = "holdfast server key"
_LONGEST = 400  # characters of a key or a signature


@dataclass(frozen=True)
class Link:
    """A key and the signature of the key before it."""

    key: str
    signature: str

    def plain(self) -> dict[str, str]:
        return {"key": self.key, "signature": self.signature}


def links_of(entries: Sequence[Entry]) -> list[Link]:
    """Return the last changes of the key by the ledger. A key without a signature (the first, and one after a
    loss) has no connection to those before."""
    out: list[Link] = []
    for entry in entries:
        if entry.kind == "server-key":
            signature = entry.what.get("signature")
            out = [*out, Link(str(entry.what["key"]), signature)] if isinstance(signature, str) else []
    return out[-LINKS:]


def parse_links(content: Any) -> list[Link]:
    """Read the links of a signed head; raise a ValueError for anything else."""
    if not isinstance(content, list) or len(content) > LINKS:
        raise ValueError("'keys' cannot be read")
    for one in content:
        good = isinstance(one, Mapping) and one.keys() == {"key", "signature"}
        if not good or not all(isinstance(text, str) and len(text) <= _LONGEST for text in one.values()):
            raise ValueError("'keys' cannot be read")
    return [Link(one["key"], one["signature"]) for one in content]


def successor(public: str, links: Sequence[Link]) -> str:
    """Return the newest key that this one leads to; the same one if none."""
    from holdfast.deploy.keys import verify

    for link in links:
        try:
            signature = bytes.fromhex(link.signature)
        except ValueError:
            continue
        if verify(public, _CONTEXT, link.key.encode(), signature):
            public = link.key
    return public


def replace_server_key(ledger: Ledger, reason: str) -> str:
    """Make a new key, let the old one sign it, and enter it into the ledger. Return the new public half.
    After a kill at any point the next command finishes or forgets it."""
    from holdfast.deploy.keys import load_private, make_key, public_of, sign
    from holdfast.deploy.signed_head import SIGNING_KEY

    folder = ledger.path.parent
    held = lock(folder / "rotation.lock", wait=True)
    assert held is not None
    try:
        _finish(ledger)
        make_key(folder / NEXT_KEY)
        public = public_of(folder / NEXT_KEY) + " server"
        signature = sign(load_private(folder / SIGNING_KEY), _CONTEXT, public.encode()).hex()
        ledger.append("server-key", key=public, signature=signature, reason=reason, by="operator")
        _finish(ledger)
    finally:
        unlock(held)
    ledger.sign()
    return public


def finish_replacement(path: Path) -> None:
    """Finish a change of the key that was interrupted: the ledger says whether it has begun to hold."""
    from holdfast.deploy.ledger import Ledger

    if not path.with_name(NEXT_KEY).exists():
        return
    held = lock(path.with_name("rotation.lock"), wait=True)
    assert held is not None
    try:
        _finish(Ledger(path))
    except RunError:  # a damaged ledger: the check that follows says so
        return
    finally:
        unlock(held)


def _finish(ledger: Ledger) -> None:
    from holdfast.deploy.keys import public_of
    from holdfast.deploy.signed_head import PUBLIC_KEY, SIGNING_KEY

    new = ledger.path.with_name(NEXT_KEY)
    if not new.exists():
        return
    named, public = ledger.of("server-key"), public_of(new) + " server"
    if named and str(named[-1].what["key"]) == public:
        write_atomically(ledger.path.with_name(PUBLIC_KEY), (public + "\n").encode())
        os.replace(new, ledger.path.with_name(SIGNING_KEY))
    else:
        new.unlink()
