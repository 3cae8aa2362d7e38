"""Refused requests of nodes with a key: the proxy writes them to server/refusals.jsonl, and `up` adds
offences to the ledger as strikes.

The file has one JSON object per line: at, fingerprint, kind, what, path, round, strike. There is one line for
each key, kind and round, however often it happens, and a second file when the first is full, so its size is
bounded."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

from holdfast.core.errors import RunError, in_print
from holdfast.core.reading import is_whole, parse_json, read_json
from holdfast.deploy.enrolment import Enrolment
from holdfast.deploy.ledger import Ledger

_FULL = 4_000_000  # bytes of the file, after which it becomes refusals.old.jsonl
_PIECE = 1 << 20  # bytes that are read at a time
_BY = "proxy"


class Refusals:
    """Writes the file, in the proxy. `head` is the file that every committed round replaces."""

    def __init__(self, file: Path | None, head: Path | None):
        self.file, self.head = file, head
        self.round, self.noted = 0, set[tuple[str, str]]()

    def record(self, fingerprint: str, kind: str, what: str, path: str, strike: bool) -> None:
        round = self._round()
        if round != self.round:
            self.round, self.noted = round, set()
        if (fingerprint, kind) in self.noted:
            return
        self.noted.add((fingerprint, kind))
        print(f"key {fingerprint[:16]}: {what}", file=sys.stderr, flush=True)
        now, where = (
            datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            in_print(path)[:80],
        )
        line = {
            "at": now,
            "fingerprint": fingerprint,
            "kind": kind,
            "what": what,
            "path": where,
            "round": round,
            "strike": strike,
        }
        try:
            self._append(json.dumps(line) + "\n")
        except OSError as error:  # a full disk must not stop the proxy
            print(f"cannot write {self.file}: {error.strerror}; free some space", file=sys.stderr, flush=True)

    def _append(self, line: str) -> None:
        if self.file is None:
            return
        if self.file.exists() and self.file.stat().st_size > _FULL:
            os.replace(self.file, self.file.with_suffix(".old.jsonl"))
        with open(os.open(self.file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "w") as file:
            file.write(line)

    def _round(self) -> int:
        """Return the current round."""
        try:
            head = (read_json(self.head) or {}) if self.head is not None else {}
        except RunError:
            head = {}
        return int(head["round"]) + 1 if is_whole(head.get("round")) else 1


class ProxyStrikes:
    """Reads the file, in `up`."""

    def __init__(self, file: Path):
        self.file, self.at = file, 0

    def add_to(self, ledger: Ledger) -> None:
        """Add new lines to the ledger as strikes: one for each client, kind and round of a run, also when
        `up` or the proxy are restarted."""
        lines = self._lines()
        if not lines:
            return
        who = Enrolment.of(ledger.entries)
        clients = {
            member.fingerprint: client for client, member in who.members.items()
        }  # a key that was replaced may be a thief's
        for line in lines:
            client = clients.get(str(line.get("fingerprint")))
            if (
                client is not None
                and line.get("strike") is True
                and is_whole(line.get("round"))
                and not _is_struck(ledger, client, line)
            ):
                said = {name: in_print(str(line.get(name)))[:200] for name in ("what", "kind", "at")}
                ledger.append(
                    "strike",
                    client,
                    line["round"],
                    reason=said["what"],
                    by=_BY,
                    offence=said["kind"],
                    seen=said["at"],
                )

    def _lines(self) -> list[dict[str, Any]]:
        try:
            if self.file.stat().st_size < self.at:  # a new one
                self.at = 0
            with open(self.file, "rb") as file:
                file.seek(self.at)
                whole = file.read(_PIECE)
        except FileNotFoundError:
            return []
        end = whole.rfind(b"\n") + 1
        self.at += end or (len(whole) if len(whole) == _PIECE else 0)
        out = []
        for line in whole[:end].splitlines():
            try:
                content = parse_json(line)
            except ValueError:
                continue
            out.extend([content] if isinstance(content, dict) else [])
        return out


def _is_struck(ledger: Ledger, client: int, line: dict[str, Any]) -> bool:
    begun = max((entry.number for entry in ledger.of("start")), default=-1)
    for entry in ledger.of("strike"):
        if (
            entry.client == client
            and entry.what.get("by") == _BY
            and entry.what.get("offence") == line.get("kind")
        ):
            if entry.what.get("seen") == line.get("at") or (
                entry.round == line["round"] and entry.number > begun
            ):
                return True
    return False
