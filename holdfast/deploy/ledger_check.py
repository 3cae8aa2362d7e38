"""Compares the ledger with the run's head file, the digests of the run's states, the head that the server has
signed, and a head that was kept elsewhere. A ledger that is empty, older or different is refused.

All of these only ever follow the ledger: a line is on the disk before a head that counts it is written
anywhere. So after a kill at any point the ledger has at least what they state, and a process that reads them
first and the ledger afterwards finds no contradiction."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from holdfast.core.errors import ConfigError, HoldfastError, RunError
from holdfast.core.reading import is_whole, read_whole
from holdfast.deploy.check import Check
from holdfast.deploy.ledger import Entry, Ledger
from holdfast.deploy.server_keys import NEXT_KEY
from holdfast.deploy.signed_head import PUBLIC_KEY, SIGNED_HEAD, read_signed_head
from holdfast.storage.store import Store

Found = TypeVar("Found")
_HEX = re.compile(r"[0-9a-f]{64}")
_FEWEST = 16  # digits of a head that was kept elsewhere: as many as the shortest output shows


@dataclass(frozen=True)
class RunHead:
    """The contents of run/head.json. Older files, from before head files named the ledger, have no head."""

    round: int
    entries: int = 0
    head: str = ""


class LedgerCheck:
    """A ledger and the run beside it, as read at one moment."""

    def __init__(self, path: Path, run: Path):
        self.path, self.store = path, Store(run)
        self.problems: dict[str, str] = {}
        self.signed = self._try("signed head", lambda: read_signed_head(path.with_name(SIGNED_HEAD)))
        self.head = self._try("run", self._read_head)
        manifest = self._try("run", lambda: self.store.read_json("manifest.json")) or {}
        self.run = str(manifest.get("label", ""))
        self.ledger = self._try("ledger", lambda: Ledger(path))

    def examine(self, given: str | None = None) -> Iterator[Check]:
        """Check everything that can be checked; `given` is a head that was kept elsewhere, in hex or as a
        file."""
        ledger = self.ledger
        if ledger is None:
            yield Check("ledger", False, self.problems["ledger"])
            return
        yield Check(
            "ledger",
            True,
            f"{len(ledger.entries)} entries, every line follows the one before; head {ledger.head}",
        )
        checks: dict[str, Callable[[Ledger], str]] = {
            "run": self._run,
            "model": self._model,
            "signed head": self._signature,
        }
        if given is not None:
            checks["given head"] = lambda ledger: self._given(ledger, given)
        for what, check in checks.items():
            try:
                if what in self.problems:
                    raise RunError(self.problems[what])
                yield Check(what, True, check(ledger))
            except (HoldfastError, OSError) as error:
                yield Check(what, False, " ".join(str(error).split()))

    def require(self) -> Ledger:
        """Return the ledger if all checks are good; else raise a RunError that says what to do."""
        for check in self.examine():
            if not check.good:
                accept = f"holdfast federation accept-ledger {self.path.parent.parent} --reason TEXT"
                raise RunError(
                    f"{check.said}; restore the newest copy of server/, or accept the loss: `{accept}`"
                )
        assert self.ledger is not None
        return self.ledger

    @property
    def public(self) -> str | None:
        """The key that signs the heads: the one that the ledger names; in an older federation, that of the
        file."""
        named = self.ledger.of("server-key") if self.ledger is not None else []
        return str(named[-1].what["key"]) if named else _read_text(self.path.with_name(PUBLIC_KEY))

    def key_at(self, entries: int) -> str | None:
        """Return the key that signed heads when the ledger had so many entries: of a longer ledger than this
        one, the newest key."""
        named = self.ledger.of("server-key") if self.ledger is not None else []
        before = [entry for entry in named if entry.number < entries]
        return str((before or named[:1])[-1].what["key"]) if named else self.public

    def names(self, public: str) -> bool:
        """Return whether this is the key that signs the heads; the comment of a key does not matter."""
        return self.public is not None and self.public.split()[:2] == public.split()[:2]

    def claims(self) -> list[dict[str, object]]:
        """Return the heads that a file names and the ledger does not have: what the operator accepts as
        lost."""
        heads = {(one.entries, one.head) for one in (self.signed, self.head) if one is not None and one.head}
        return [
            {"entries": n, "head": head}
            for n, head in sorted(heads)
            if self.ledger is None or not self.ledger.had(n, head)
        ]

    def _try(self, what: str, read: Callable[[], Found | None]) -> Found | None:
        try:
            return read()
        except (HoldfastError, OSError) as error:
            self.problems.setdefault(what, " ".join(str(error).split()))
            return None

    def _read_head(self) -> RunHead | None:
        content = self.store.read_json("head.json")
        if content is None:
            return None
        round, named = content.get("round"), content.get("ledger")
        if is_whole(round) and named is None:
            return RunHead(int(str(round)))
        if not (
            is_whole(round)
            and isinstance(named, dict)
            and is_whole(named.get("entries"))
            and _HEX.fullmatch(str(named.get("head")))
        ):
            raise RunError(
                f"{self.store.path / 'head.json'} is damaged: it names no round, or no head of the ledger"
            )
        return RunHead(int(str(round)), named["entries"], named["head"])

    def _accepted(self, ledger: Ledger) -> list[Entry]:
        """Return the entries in which the operator has accepted a loss. Where there is a key, they count only
        once they are signed: otherwise a person who removes lines could write them too."""
        signed = self.signed
        most = 0 if signed is None or not ledger.had(signed.entries, signed.head) else signed.entries
        return [entry for entry in ledger.of("reset") if self.public is None or entry.number < most]

    def _run(self, ledger: Ledger) -> str:
        """Check that the ledger has all entries from when the last round was committed, and records every
        round but perhaps that one."""
        head, where = self.head, self.store.path / "head.json"
        if head is None:
            return "no round is committed yet"
        recorded, accepted = ledger.last_round(self.run), self._accepted(ledger)
        # The run may have committed a round since its head file was read.
        if recorded > head.round and recorded > (self.store.round() or 0):
            raise RunError(
                f"{self.store.path} is older than the ledger: it ends with round {head.round}, and the ledger"
                f" records {recorded}"
            )
        if head.head and not ledger.had(head.entries, head.head):
            if not any(
                {"entries": head.entries, "head": head.head} in entry.what.get("lost", [])
                for entry in accepted
            ):
                raise RunError(_gone(ledger, head.entries, where))
            return f"round {head.round}; the operator has accepted that the ledger of that round is lost"
        known = max(
            [recorded, *(entry.round or 0 for entry in accepted if entry.what.get("run") == self.run)]
        )
        if known < head.round - 1:
            raise RunError(
                f"{ledger.path} records {recorded} rounds of this run, {where} is of round {head.round}:"
                " lines were removed"
            )
        return (
            f"round {head.round} was committed after {head.entries} entries"
            if head.head
            else f"round {head.round}; {recorded} rounds are recorded"
        )

    def _model(self, ledger: Ledger) -> str:
        """Check the digest of the committed state, and of earlier states that were not yet removed, against
        the ledger."""
        if self.head is None:
            return "no round is committed yet"
        stated = {
            entry.round: str(entry.what["model"])
            for entry in ledger.of("round", "reset")
            if entry.what.get("run") == self.run and entry.what.get("model") is not None
        }
        here = [
            int(file.stem)
            for file in (self.store.path / "state").glob("*.safetensors")
            if re.fullmatch(r"\d{6,10}", file.stem)
        ]
        said = f"the ledger does not record round {self.head.round} yet"
        for round in sorted({*here, self.head.round}):
            digest = (
                self.store.digest(round) if round <= self.head.round else None
            )  # a later one was never committed
            if digest is not None and stated.get(round, digest) != digest:
                file = self.store.path / self.store.state_file(round)
                raise RunError(f"{file} is not the state whose SHA-256 the ledger has for round {round}")
            if digest is None and round == self.head.round == self.store.round():
                raise RunError(
                    f"{self.store.path}: the committed state {self.store.state_file(round)} is missing"
                )
            if round == self.head.round and round in stated:
                said = (
                    f"the state of round {round} has the SHA-256 that the ledger has for it,"
                    f" {stated[round][:_FEWEST]}"
                )
        return said

    def _signature(self, ledger: Ledger) -> str:
        signed, public, file = self.signed, self.public, self.path.with_name(SIGNED_HEAD)
        if signed is None:
            if ledger.of("server-key"):
                raise RunError(f"{file} is missing: the last signed head is not known")
            return "nothing is signed yet: the next `holdfast federation up` makes the key and signs"
        ours = _read_text(self.path.with_name(PUBLIC_KEY))
        replaced = self.path.with_name(NEXT_KEY).exists()  # the next command finishes that
        if public is None or (ours is not None and not self.names(ours) and not replaced):
            raise RunError(
                f"{self.path.with_name(PUBLIC_KEY)} is missing or not the key that the ledger names"
            )
        if not signed.is_signed_by(self.key_at(signed.entries) or public):
            raise RunError(f"{file}: the signature is not valid")
        if not ledger.had(signed.entries, signed.head):
            raise RunError(_gone(ledger, signed.entries, file))
        return f"{signed.entries} of {len(ledger.entries)} entries, signed {signed.at}"

    def _given(self, ledger: Ledger, given: str) -> str:
        """Check a head in hex, as it was printed, or a file with a signed one."""
        if re.fullmatch(rf"[0-9a-fA-F]{{{_FEWEST},64}}", given):
            place = next(
                (n for n, head in enumerate(ledger.heads[1:], 1) if head.startswith(given.lower())), None
            )
            if place is None:
                raise RunError(
                    f"{given} was never a head of this ledger: lines were removed or"
                    f" changed{self._known_loss(ledger, given)}"
                )
            return f"it was the head after {place} of {len(ledger.entries)} entries"
        head = read_signed_head(Path(given))
        if head is None:
            raise ConfigError(
                f"--head: {given} is neither a head ({_FEWEST} to 64 hexadecimal digits) nor a file"
            )
        public = self.key_at(head.entries)
        if public is None or not head.is_signed_by(public):
            raise RunError(f"{given}: it is not signed by the key that this ledger names")
        if not ledger.had(head.entries, head.head):
            raise RunError(_gone(ledger, head.entries, Path(given)) + self._known_loss(ledger, head.head))
        return f"it was the head after {head.entries} of {len(ledger.entries)} entries, signed {head.at}"

    def _known_loss(self, ledger: Ledger, head: str) -> str:
        for entry in ledger.of("reset"):
            if any(
                str(lost.get("head", "")).startswith(head.lower())
                for lost in entry.what.get("lost", [])
                if isinstance(lost, dict)
            ):
                return f"; the operator has accepted that on {entry.at}: {entry.what.get('reason', '')}"
        return ""


def _gone(ledger: Ledger, entries: int, where: Path) -> str:
    said = (
        f"{ledger.path} has {len(ledger.entries)} entries, and not the head that {where} names after"
        f" {entries}"
    )
    return f"{said}: lines were removed or changed"


def _read_text(file: Path) -> str | None:
    try:
        return read_whole(file, 1 << 16).decode(errors="replace")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}") from None
