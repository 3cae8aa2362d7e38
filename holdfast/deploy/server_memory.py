"""What a node remembers of its server, so that it refuses one that lost rounds: an old backup that was
restored, or lines that were removed.

    STATE-DIR/ledger.head     the signed head of the longest ledger that the server has shown
    STATE-DIR/server.json     the last round of each run that was committed as the server said; the reason,
                              once a server was refused; and the losses that the node's owner has accepted

The heads of a server that was put back are signed later than the one that is kept, and count fewer entries. A
head that was signed earlier is that of a late order. This file does not import torch."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, RunError
from holdfast.core.files import as_json, replace_file, write_atomically, write_json
from holdfast.core.reading import is_whole, parse_json, read_json, read_whole

HEAD = 4096  # bytes of a signed head of the ledger
_RUNS = 20  # that are remembered
_REMEDY = "restore its newest backup, or accept the loss here: `holdfast federation accept-loss NODE`"


class ServerLostRounds(RunError):
    """The server is older than what this node has seen of it; nothing is done for it."""


@dataclass(frozen=True)
class ShownHead:
    """A head of the ledger as an order carries it. The order's signature covers it."""

    entries: int
    head: str
    at: datetime.datetime | None

    @staticmethod
    def parse(text: str) -> ShownHead | None:
        try:
            content = parse_json(text) if len(text) <= HEAD else None
        except ValueError:
            return None
        if not isinstance(content, dict):
            return None
        entries, head = content.get("entries"), content.get("head")
        if not is_whole(entries, least=1) or not isinstance(head, str):
            return None
        try:
            at = datetime.datetime.fromisoformat(str(content.get("at")))
        except ValueError:
            at = None
        return ShownHead(int(str(entries)), head, at if at is None or at.tzinfo else None)


@dataclass(frozen=True)
class ServerMemory:
    """The memory of one node, in its state folder."""

    state: Path

    def check(self, head: str, run: str = "", committed: int = 0) -> None:
        """Compare an order with what is remembered, and remember it; raise ServerLostRounds if the server is
        older. Once it was, every order is refused until the owner of the node accepts the loss: the ledger of
        such a server grows again."""
        note = self._note()
        if isinstance(note.get("lost"), str):
            raise ServerLostRounds(note["lost"])
        shown, kept = ShownHead.parse(head), self.kept()
        if shown is not None and kept is not None:
            if why := _contradiction(kept, shown):
                said = f"refused: the server lost rounds. {why}; {_REMEDY}"
                write_json(self._file, {**note, "lost": said})
                raise ServerLostRounds(said)
        rounds = note.get("rounds")
        rounds = rounds if isinstance(rounds, dict) else {}
        before = rounds[run] if is_whole(rounds.get(run)) else 0
        if run and committed < before:
            raise ServerLostRounds(
                f"refused: this order follows round {committed}, and round {before} was committed already."
                f" It is an old order, or the server lost rounds: {_REMEDY}"
            )
        if run and (run not in rounds or committed > before):
            others = [(name, last) for name, last in rounds.items() if name != run]
            new = {**note, "rounds": dict([*others[-_RUNS + 1 :], (run, committed)])}
            replace_file(self._file, as_json(new))
        if shown is not None and (kept is None or shown.entries > kept.entries):
            write_atomically(self._head, head.encode())

    def refused(self) -> str:
        """Return why the server is refused; empty if it is not."""
        lost = self._note().get("lost")
        return lost if isinstance(lost, str) else ""

    def kept(self) -> ShownHead | None:
        """Return the head of the longest ledger that the server has shown."""
        try:
            return ShownHead.parse(read_whole(self._head, HEAD).decode(errors="replace"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunError(f"{self._head} cannot be read: {error}") from None

    def accept(self, reason: str) -> str:
        """Forget what the server has lost: the next order is taken as its first. What was kept stays as
        evidence under another name. Return what it was."""
        note, kept = self._note(), self.kept()
        if kept is None and "rounds" not in note:
            raise ConfigError(f"{self.state}: this node has not seen any ledger of its server yet")
        now = datetime.datetime.now(datetime.UTC)
        told = f"{kept.entries} entries, head {kept.head[:16]}" if kept is not None else "no ledger"
        if kept is not None:
            os.replace(self._head, self.state / f"ledger-before-{now:%Y%m%dT%H%M%S%f}.head")
        before = note.get("accepted")
        entry = {"at": now.isoformat(timespec="seconds"), "reason": reason, "seen": told}
        accepted = [*(before if isinstance(before, list) else []), entry]
        write_json(self._file, {"accepted": accepted[-_RUNS:]})
        return told

    @property
    def _file(self) -> Path:
        return self.state / "server.json"

    @property
    def _head(self) -> Path:
        return self.state / "ledger.head"

    def _note(self) -> dict[str, Any]:
        return read_json(self._file) or {}


def _contradiction(kept: ShownHead, shown: ShownHead) -> str:
    """Return what the newer head takes back; empty if nothing. A head that was signed no later than the kept
    one is that of an order that came late."""
    if kept.at is None or shown.at is None or shown.at <= kept.at:
        return ""
    if shown.entries < kept.entries:
        return f"Its ledger has {shown.entries} entries and had {kept.entries}"
    if shown.entries == kept.entries and shown.head != kept.head:
        return f"Entry {kept.entries} of its ledger is another than it was"
    return ""
