"""The ledger of a federation: all decisions, in order, permanently.

It has one JSON object per line. Every line carries the SHA-256 of the line before it, so a change breaks the
chain. A person who can write the file can recompute the chain; then only a head (the hash of the last line)
that was kept elsewhere reveals the change: in the run's head file, signed in ledger.head, or on another
machine (ledger_check.py). A line is on the disk before `append` returns. Several processes may append: the
run, and the operator's commands."""

from __future__ import annotations

import datetime
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import RunError
from holdfast.core.files import clean, plain_disk_errors, sync, write_atomically
from holdfast.core.reading import is_number, is_whole, parse_json
from holdfast.deploy.server_keys import links_of
from holdfast.deploy.signed_head import SIGNED_HEAD, SIGNING_KEY, SignedHead, read_signed_head

_START = "0" * 64
_PIECE = 1 << 20  # bytes that are read at a time
_LINE = 1 << 26  # bytes of one line: a round in which a million clients take part has fewer


@dataclass(frozen=True)
class Entry:
    """One line."""

    number: int
    at: str
    kind: str
    client: int | None = None
    round: int | None = None
    what: dict[str, Any] = field(default_factory=dict)


class Ledger:
    """The file, read and checked up to the last line seen."""

    def __init__(self, path: Path, read: bool = True):
        self.path = Path(path)
        self.entries: list[Entry] = []
        self.heads = [_START]
        """The head after each number of entries."""
        self._read_to = 0
        self._signed = ""
        if read:
            self.refresh()

    @property
    def head(self) -> str:
        return self.heads[-1]

    def had(self, entries: int, head: str) -> bool:
        """Return whether this was its head when it had so many entries."""
        return entries < len(self.heads) and self.heads[entries] == head

    def append(self, kind: str, client: int | None = None, round: int | None = None, **what: Any) -> Entry:
        """Write one line; it is on the disk afterwards."""
        with self._locked() as file:
            self._read_new(file)
            os.truncate(file, self._read_to)  # an incomplete last line of a killed writer
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            content = {
                "number": len(self.entries),
                "at": now,
                "kind": kind,
                "client": client,
                "round": round,
                "what": what,
            }
            line = (
                json.dumps(
                    clean({**content, "before": self.head}), sort_keys=True, separators=(",", ":")
                ).encode()
                + b"\n"
            )
            with plain_disk_errors(self.path):
                if os.pwrite(file, line, self._read_to) < len(
                    line
                ):  # a disk that is nearly full takes a part
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file)
            self._read_new(file)
        return self.entries[-1]

    def refresh(self) -> list[Entry]:
        """Read and check the entries that were added since the last read; return them."""
        known = len(self.entries)
        if not self.path.exists():
            if self._read_to:
                raise RunError(f"{self.path} is missing: its lines are lost")
        else:
            with open(self.path, "rb") as file:
                self._read_new(file.fileno())
        return self.entries[known:]

    @staticmethod
    def whole_part(path: Path) -> int:
        """Return the bytes of a damaged file up to the first line that does not follow the one before it."""
        ledger = Ledger(path, read=False)
        try:
            ledger.refresh()
        except RunError:
            pass
        return ledger._read_to

    def of(self, *kinds: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind in kinds]

    def last_round(self, run: str) -> int:
        """Return the last recorded round of a run. Where the operator has accepted that the run is older, the
        round of the run."""
        last = 0
        for entry in self.of("round", "reset"):
            if entry.what.get("run") == run and entry.round is not None:
                last = max(last, entry.round) if entry.kind == "round" else min(last, entry.round)
        return last

    def sign(self, anew: bool = False) -> None:
        """Sign the current head into ledger.head, if the server's key is there. An existing signed head that
        this ledger never had proves that lines are missing: it is replaced only `anew`, when the operator has
        accepted the loss."""
        key = self.path.with_name(SIGNING_KEY)
        if not key.exists():
            return
        from holdfast.deploy.keys import load_private

        with self._locked() as file:
            self._read_new(file)
            if self._signed == self.head and not anew:
                return
            before = None if anew else read_signed_head(self.path.with_name(SIGNED_HEAD))
            if before is not None and before.head == self.head:
                self._signed = self.head
                return
            if before is not None and not self.had(before.entries, before.head):
                raise RunError(
                    f"{self.path} does not hold what {SIGNED_HEAD} says: signed lines were removed or changed"
                )
            signed = SignedHead.make(load_private(key), len(self.entries), self.head, links_of(self.entries))
            write_atomically(self.path.with_name(SIGNED_HEAD), signed.to_bytes())
            self._signed = self.head

    @contextmanager
    def _locked(self) -> Iterator[int]:
        fresh = not self.path.exists()
        file = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if fresh:
                sync(self.path.parent)
            yield file
        finally:
            os.close(file)

    def _read_new(self, file: int) -> None:
        size = os.fstat(file).st_size
        if size < self._read_to:
            raise RunError(f"{self.path} has become shorter: lines were removed")
        at, rest = self._read_to, b""
        while piece := os.pread(file, min(_PIECE, size - at), at):
            at += len(piece)
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                self._add(line + b"\n")
            if len(rest) > _LINE:
                raise RunError(
                    f"{self.path} is damaged: line {len(self.entries) + 1} is longer than {_LINE:,} bytes"
                )

    def _add(self, line: bytes) -> None:
        self.entries.append(self._checked(line))
        self.heads.append(hashlib.sha256(line).hexdigest())
        self._read_to += len(line)

    def _checked(self, line: bytes) -> Entry:
        number = len(self.entries)
        try:
            content = parse_json(line)
            before = content.pop("before")
            entry = Entry(**content)
            _check(entry)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise RunError(f"{self.path} is damaged: line {number + 1} is not an entry") from None
        if before != self.head or entry.number != number:
            raise RunError(
                f"{self.path} is damaged: line {number + 1} does not follow the line before it; lines were"
                " changed or removed"
            )
        return entry


def _check(entry: Entry) -> None:
    """Raise a ValueError or TypeError for contents that Holdfast never writes: without a head kept elsewhere
    the chain does not reveal changes."""
    datetime.datetime.fromisoformat(entry.at)
    numbers = all(value is None or is_whole(value) for value in (entry.client, entry.round))
    if not numbers or not isinstance(entry.kind, str) or not isinstance(entry.what, dict):
        raise ValueError("of another type")
    if entry.kind in ("enrol", "rotate", "server-key") and not isinstance(entry.what.get("key"), str):
        raise ValueError("no key")
    if entry.kind == "server-key" and not isinstance(entry.what.get("signature", ""), str):
        raise ValueError("no signature")
    if any(not isinstance(entry.what.get(name, []), list) for name in ("took_part", "ids", "lost")):
        raise ValueError("no list of clients")
    if entry.kind == "pause" and not all(
        is_whole(value) for value in (entry.client, entry.what.get("until"), entry.what.get("pauses"))
    ):
        raise ValueError("no pause")
    if entry.kind == "missing" and not isinstance(entry.what.get("clients"), dict):
        raise ValueError("no missing clients")
    if entry.kind == "round" and not (
        entry.what.get("accuracy") is None or is_number(entry.what["accuracy"])
    ):
        raise ValueError("no accuracy")
