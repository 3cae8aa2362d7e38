"""Every decision of a run, written into the federation's ledger; and the ledger's bans, brought into the run.

A round is told once it is committed, with the SHA-256 of its state file. A server that was killed in between
tells it when it starts again, so that no round is missing and none is told twice. In the other direction the
run's head file names the ledger as of each commit, so that run and ledger prove each other (ledger_check.py);
after every exchange that has added entries, the head of the ledger is signed."""

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

_MOST = 64  # numbers of a table that are written out; larger ones are in the run directory


class Chronicle:
    def __init__(self, ledger: Ledger | None, out: Path):
        self.ledger, self.store = ledger, Store(out)
        self.run, self.told = "", 0

    def begin(self, experiments: list[Experiment]) -> None:
        """Before the first exchange: what the last server left untold, and who the operator has pardoned or
        banned since."""
        if self.ledger is None:
            return
        LedgerCheck(self.ledger.path, self.store.path).require()
        committed, self.run = self._committed(), experiments[0].label  # which a ledger may have several of
        self.told = self.ledger.told(self.run)
        self.ledger.append("resume" if committed else "start", round=committed, run=self.run)
        self._tell(committed)
        for experiment in experiments:
            experiment.store.also = self._as_of_now
            self._judge(experiment)

    def follow(self, experiment: Experiment) -> None:
        """After every exchange."""
        if self.ledger is not None:
            self._tell(self._committed())
            self._judge(experiment)

    def finish(self, result: dict[str, Any]) -> None:
        if self.ledger is not None and not any(
            entry.what.get("run") == self.run for entry in self.ledger.of("finish")
        ):
            self._tell(self._committed())
            self.ledger.append("finish", round=result["rounds"], run=self.run, final=result["final"])
            self.ledger.sign()

    def _as_of_now(self) -> dict[str, Any]:
        """What a commit says of the ledger."""
        assert self.ledger is not None
        self.ledger.refresh()
        return {"ledger": {"entries": len(self.ledger.entries), "head": self.ledger.head}}

    def _committed(self) -> int:
        return self.store.round() or 0

    def _judge(self, experiment: Experiment) -> None:
        """A pardon must be told before the run restores its own bans; a ban holds from the next cohort on."""
        assert self.ledger is not None
        self.ledger.refresh()
        who = Enrolment.of(self.ledger.entries)
        pardoned = {entry.client for entry in self.ledger.of("unban") if entry.client is not None} - set(
            who.banned
        )
        experiment.participation.pardon(pardoned)
        experiment.participation.ban(dict(who.banned))

    def _tell(self, committed: int) -> None:
        assert self.ledger is not None
        for round in range(self.told + 1, committed + 1):
            part, arrays = self.store.part(round), self.store.arrays(round)
            if (
                part is None
            ):  # what a head says alone may be a billion rounds, and each would become a line for good
                raise RunError(
                    f"{self.store.path} is damaged: parts/{round:06d}.json is missing, of a round that is"
                    " committed"
                )
            told = {
                e.client for e in self.ledger.of("ban") if e.round == round and e.what.get("run") == self.run
            }  # and then it was killed
            for client, reason in part.get("banned", {}).items():
                if int(client) not in told:
                    self.ledger.append("ban", int(client), round, reason=reason, by="method", run=self.run)
            digest = self.store.digest(
                round
            )  # of the last round at least: the next is committed only after this one was told
            model = {} if digest is None else {"model": digest}
            self.ledger.append("round", None, round, run=self.run, **model, **_decisions(part, arrays))
        self.told = max(self.told, committed)
        self.ledger.sign()


def _decisions(part: dict[str, Any], arrays: dict[str, Tensor]) -> dict[str, Any]:
    """Who took part, with which weight, scores, votes and thresholds, who was rejected or refused and why,
    and how it came out."""
    said = {
        name: part.get(name)
        for name in ("rejected", "refused", "notes", "fallback", "diverged")
        if part.get(name)
    }
    tables = {
        name.removeprefix("verdict/"): value for name, value in arrays.items() if name.startswith("verdict/")
    }
    metrics = part.get("metrics", {})
    return {
        **said,
        "took_part": arrays["took_part"].tolist() if "took_part" in arrays else [],
        **{name: value.tolist() for name, value in tables.items() if value.numel() <= _MOST},
        "accuracy": metrics.get("accuracy"),
        "bytes/up": metrics.get("bytes/up"),
        "bytes/down": metrics.get("bytes/down"),
    }
