"""The ledger of a federation: everything that was decided, in the order in which it was, for good.

One JSON object a line. Every line carries the SHA-256 of the line before it, so that nothing can be changed, taken out or put in without
every later line telling; who has written down the head (the hash of the last line) can also tell whether the end was cut off. A line is on
the disk before `append` returns. Several processes may append: the run, and the operator who bans somebody."""

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
from holdfast.files import clean, is_number, is_whole, parse_json, readable, sync

_START = "0" * 64
_PIECE = 1 << 20  # bytes that are read at a time
_LINE = 1 << 26  # bytes of one line: a round in which a million clients take part has fewer


@dataclass(frozen=True)
class Entry:
    number: int
    at: str
    kind: str
    client: int | None = None
    round: int | None = None
    what: dict[str, Any] = field(default_factory=dict)


class Ledger:
    def __init__(self, path: Path):
        self.path = Path(path)
        self.entries: list[Entry] = []
        self.head = _START
        self._read_to = 0
        self.refresh()

    def append(self, kind: str, client: int | None = None, round: int | None = None, **what: Any) -> Entry:
        """Write one line; it is on the disk afterwards."""
        with self._locked() as file:
            self._take_in(file)
            os.truncate(file, self._read_to)  # what a writer that was killed has left of its last line
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            content = {"number": len(self.entries), "at": now, "kind": kind, "client": client, "round": round, "what": what}
            line = json.dumps(clean({**content, "before": self.head}), sort_keys=True, separators=(",", ":")).encode() + b"\n"
            with readable(self.path):
                if os.pwrite(file, line, self._read_to) < len(line):  # a disk that is nearly full takes a part
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file)
            self._take_in(file)
        return self.entries[-1]

    def refresh(self) -> list[Entry]:
        """What has been written since the last look, by anybody; checked."""
        known = len(self.entries)
        if self.path.exists():
            with open(self.path, "rb") as file:
                self._take_in(file.fileno())
        return self.entries[known:]

    def of(self, *kinds: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind in kinds]

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

    def _take_in(self, file: int) -> None:
        size = os.fstat(file).st_size
        if size < self._read_to:
            raise RunError(f"{self.path} has become shorter: lines that were there are gone")
        at, rest = self._read_to, b""
        while piece := os.pread(file, min(_PIECE, size - at), at):
            at += len(piece)
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                self._add(line + b"\n")
            if len(rest) > _LINE:
                raise RunError(f"{self.path} is damaged: line {len(self.entries) + 1} is longer than {_LINE:,} bytes")

    def _add(self, line: bytes) -> None:
        self.entries.append(self._checked(line))
        self.head = hashlib.sha256(line).hexdigest()
        self._read_to += len(line)

    def _checked(self, line: bytes) -> Entry:
        number = len(self.entries)
        try:
            content = parse_json(line)
            before = content.pop("before")
            entry = Entry(**content)
            _check(entry)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise RunError(f"{self.path} is damaged: line {number + 1} is no entry") from None
        if before != self.head or entry.number != number:
            raise RunError(f"{self.path} is damaged: line {number + 1} does not follow the line before it; lines were changed or taken out")
        return entry


def _check(entry: Entry) -> None:
    """A ValueError or TypeError where it holds what nobody writes: the chain tells of changes only to who has written its head down."""
    datetime.datetime.fromisoformat(entry.at)
    numbers = all(value is None or is_whole(value) for value in (entry.client, entry.round))
    if not numbers or not isinstance(entry.kind, str) or not isinstance(entry.what, dict):
        raise ValueError("of another type")
    if entry.kind in ("enrol", "rotate") and not isinstance(entry.what.get("key"), str):
        raise ValueError("no key")
    if any(not isinstance(entry.what.get(name, []), list) for name in ("took_part", "ids")):
        raise ValueError("no list of clients")
    if entry.kind == "missing" and not isinstance(entry.what.get("clients"), dict):
        raise ValueError("nobody is missing")
    if entry.kind == "round" and not (entry.what.get("accuracy") is None or is_number(entry.what["accuracy"])):
        raise ValueError("no accuracy")
