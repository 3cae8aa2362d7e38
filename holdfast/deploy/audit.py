"""Writes every decision of a run into the federation's ledger, and brings the ledger's bans into the run.

A round is recorded once it is committed, with the SHA-256 of its state file. A server that was killed in
between records it when it starts again, so every round is recorded exactly once. In the other direction the
run's head file names the ledger as of each commit, so run and ledger prove each other (ledger_check.py).
After every exchange that has added entries, the head of the ledger is signed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from holdfast.core.errors import RunError
from holdfast.deploy.enrolment import Enrolment
from holdfast.deploy.ledger import Ledger
from holdfast.deploy.ledger_check import LedgerCheck
from holdfast.experiment.loop import Experiment
from holdfast.storage.store import Store

_MOST = 64  # numbers of a table that are written into the ledger; larger tables are in the run directory


class Audit:
    """The link between one run and the ledger. Without a ledger it does nothing."""

    def __init__(self, ledger: Ledger | None, out: Path):
        self.ledger, self.store = ledger, Store(out)
        self.run, self.recorded = "", 0

    def begin(self, experiments: list[Experiment]) -> None:
        """Before the first exchange: record what the last server did not, and apply the operator's bans and
        pardons since."""
        if self.ledger is None:
            return
        LedgerCheck(self.ledger.path, self.store.path).require()
        committed, self.run = self._committed(), experiments[0].label  # a ledger may have several runs
        self.recorded = self.ledger.last_round(self.run)
        self.ledger.append("resume" if committed else "start", round=committed, run=self.run)
        self._record(committed)
        for experiment in experiments:
            experiment.store.also = self._ledger_as_of_now
            self._apply_bans(experiment)

    def follow(self, experiment: Experiment) -> None:
        """After every exchange: record committed rounds and apply new bans."""
        if self.ledger is not None:
            self._record(self._committed())
            self._apply_bans(experiment)

    def finish(self, result: dict[str, Any]) -> None:
        """Record the end of the run, once."""
        if self.ledger is not None and not any(
            entry.what.get("run") == self.run for entry in self.ledger.of("finish")
        ):
            self._record(self._committed())
            self.ledger.append("finish", round=result["rounds"], run=self.run, final=result["final"])
            self.ledger.sign()

    def _ledger_as_of_now(self) -> dict[str, Any]:
        """Return what a commit writes about the ledger."""
        assert self.ledger is not None
        self.ledger.refresh()
        return {"ledger": {"entries": len(self.ledger.entries), "head": self.ledger.head}}

    def _committed(self) -> int:
        return self.store.round() or 0

    def _apply_bans(self, experiment: Experiment) -> None:
        """Bring the ledger's bans and pardons into the run. Pardons come before the run restores its own
        bans; a ban holds from the next cohort on."""
        assert self.ledger is not None
        self.ledger.refresh()
        who = Enrolment.of(self.ledger.entries)
        pardoned = {entry.client for entry in self.ledger.of("unban") if entry.client is not None} - set(
            who.banned
        )
        experiment.participation.pardon(pardoned)
        experiment.participation.ban(dict(who.banned))

    def _record(self, committed: int) -> None:
        assert self.ledger is not None
        for round in range(self.recorded + 1, committed + 1):
            part, arrays = self.store.part(round), self.store.arrays(round)
            # A damaged head file may claim a billion rounds, and each would become a permanent line.
            if part is None:
                raise RunError(
                    f"{self.store.path} is damaged: parts/{round:06d}.json of a committed round is missing"
                )
            # Bans that were recorded before the server was killed.
            known = {
                e.client for e in self.ledger.of("ban") if e.round == round and e.what.get("run") == self.run
            }
            for client, reason in part.get("banned", {}).items():
                if int(client) not in known:
                    self.ledger.append("ban", int(client), round, reason=reason, by="method", run=self.run)
            # The last round at least has one: the next is committed only after this one was recorded.
            digest = self.store.digest(round)
            model = {} if digest is None else {"model": digest}
            self.ledger.append("round", None, round, run=self.run, **model, **_decisions(part, arrays))
        self.recorded = max(self.recorded, committed)
        self.ledger.sign()


def _decisions(part: dict[str, Any], arrays: dict[str, Tensor]) -> dict[str, Any]:
    """Return who took part, with which weights, scores, votes and thresholds, who was rejected or refused and
    why, and the figures of the round."""
    reported = {
        name: part.get(name)
        for name in ("rejected", "refused", "notes", "fallback", "diverged")
        if part.get(name)
    }
    tables = {
        name.removeprefix("verdict/"): value for name, value in arrays.items() if name.startswith("verdict/")
    }
    metrics = part.get("metrics", {})
    return {
        **reported,
        "took_part": arrays["took_part"].tolist() if "took_part" in arrays else [],
        **{name: value.tolist() for name, value in tables.items() if value.numel() <= _MOST},
        "accuracy": metrics.get("accuracy"),
        "bytes/up": metrics.get("bytes/up"),
        "bytes/down": metrics.get("bytes/down"),
    }
