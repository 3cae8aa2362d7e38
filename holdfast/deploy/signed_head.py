"""The head of a ledger as the server has signed it: how many entries there were, the hash of the last one,
when, and the signature.

`server/ledger.head` is the newest one. Anybody who keeps one as a file can compare it with the ledger later
(`holdfast federation verify DIR --head FILE`)."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core.errors import RunError
from holdfast.core.files import as_json
from holdfast.core.reading import is_whole, parse_json, read_whole
from holdfast.deploy.server_keys import Link, parse_links

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

_CONTEXT = "holdfast ledger head"
_LARGEST = 1 << 16  # bytes of such a file
SIGNED_HEAD, SIGNING_KEY, PUBLIC_KEY = "ledger.head", "orders.key", "orders.pub"
"""Beside the ledger."""


@dataclass(frozen=True)
class SignedHead:
    """One signed head."""

    entries: int
    head: str
    at: str
    signature: str
    """ECDSA with SHA-384, in hex."""
    keys: tuple[Link, ...] = ()
    """The last changes of the server's key; each is signed by itself."""

    @staticmethod
    def make(
        key: ec.EllipticCurvePrivateKey, entries: int, head: str, keys: Sequence[Link] = ()
    ) -> SignedHead:
        from holdfast.deploy.keys import sign

        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        signature = sign(key, _CONTEXT, _content(entries, head, at)).hex()
        return SignedHead(entries, head, at, signature, tuple(keys))

    def is_signed_by(self, public: str) -> bool:
        from holdfast.deploy.keys import verify

        return verify(
            public, _CONTEXT, _content(self.entries, self.head, self.at), bytes.fromhex(self.signature)
        )

    def to_bytes(self) -> bytes:
        content = asdict(self)
        if not self.keys:  # as heads were written before keys could change
            content.pop("keys")
        return as_json(content)

    @staticmethod
    def parse(content: bytes) -> SignedHead:
        """Parse a file; raise a ValueError if it is not a signed head."""
        if len(content) > _LARGEST:
            raise ValueError(f"it is longer than the {_LARGEST:,} bytes that are read")
        table = parse_json(content)
        if (
            not isinstance(table, dict)
            or table.keys() - {"keys"} != {"entries", "head", "at", "signature"}
            or not is_whole(table["entries"])
        ):
            raise ValueError("it does not say how many entries there were")
        patterns = {"head": r"[0-9a-f]{64}", "at": r"[0-9T:.+-]{10,40}", "signature": r"([0-9a-f]{2}){1,200}"}
        if wrong := next(
            (name for name, good in patterns.items() if not re.fullmatch(good, str(table[name]), re.ASCII)),
            None,
        ):
            raise ValueError(f"'{wrong}' cannot be read")
        return SignedHead(**{**table, "keys": tuple(parse_links(table.get("keys", [])))})


def read_signed_head(file: Path) -> SignedHead | None:
    """Read a signed head; return None if there is no such file."""
    try:
        return SignedHead.parse(read_whole(file, _LARGEST))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is damaged: {' '.join(str(error).split())[:100]}") from None


def _content(entries: int, head: str, at: str) -> bytes:
    return json.dumps([entries, head, at]).encode()
