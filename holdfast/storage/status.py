"""The status of a run, read from its folder: not begun, begun, finished, diverged or failed."""

from __future__ import annotations

import datetime
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.error_origin import in_brackets, place_of
from holdfast.core.errors import HoldfastError, RunError
from holdfast.core.files import write_atomically, write_json
from holdfast.core.reading import is_whole, read_json
from holdfast.storage.store import Store

FAILURE = "failure.json"
TRACEBACK = "traceback.txt"


@dataclass(frozen=True)
class RunStatus:
    """One run. `round` is the committed one, or that in which it diverged or failed; `result` is there once
    it is finished."""

    label: str
    path: Path
    status: str
    round: int = 0
    reason: str | None = None
    result: dict[str, Any] | None = None
    mine: bool = True
    """Whether this process runs it; cells of other shards of a sweep are not run here."""
    shared: str = ""
    """Why this process did not run an unfinished cell."""

    @property
    def done(self) -> bool:
        """Whether there is nothing left to run."""
        return self.status in ("finished", "diverged", "failed")

    @property
    def words(self) -> str:
        if self.status == "finished":
            return "finished"
        if self.status in ("diverged", "failed"):
            when = f"in round {self.round}" if self.round else "before its first round"
            return f"{self.status} {when}" + (f": {self.reason}" if self.reason else "")
        begun = "not begun" if self.status == "not begun" else f"in round {self.round + 1}"
        return f"{self.shared}: {begun}" if self.shared else begun

    def plain(self) -> dict[str, Any]:
        """For --json."""
        result = self.result or {}
        return {
            "label": self.label,
            "run_dir": str(self.path),
            "status": self.shared or self.status,
            "round": self.round,
            "reason": self.reason,
            "rounds": result.get("rounds"),
            "final": result.get("final"),
            "protocol": result.get("protocol"),
        }


def run_status(path: Path, label: str) -> RunStatus:
    store = Store(path)
    result = store.result()
    if result is not None:
        result |= {"run_dir": str(path)}
        diverged = result["final"].get("diverged")
        if diverged is None:
            return RunStatus(label, path, "finished", result.get("rounds", 0), result=result)
        part = store.part(diverged) or {}
        return RunStatus(label, path, "diverged", diverged, part.get("diverged"), result)
    failure = read_json(path / FAILURE)
    if failure is not None:
        if not is_whole(failure.get("round", 0)) or not isinstance(failure.get("reason"), (str, type(None))):
            raise RunError(
                f"{path / FAILURE} is damaged: it does not say in which round and why the run failed"
            )
        return RunStatus(label, path, "failed", failure.get("round", 0), failure.get("reason"))
    round = store.round()
    return RunStatus(label, path, "not begun" if round is None else "begun", round or 0)


def write_failure(path: Path, round: int, error: Exception) -> None:
    """Write why a run cannot go on, and where the error came from. It is not tried again unless asked for."""
    when, place = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), place_of(error)
    write_atomically(path / TRACEBACK, "".join(traceback.format_exception(error)).encode())
    where = None if place is None else str(place)
    write_json(
        path / FAILURE,
        {
            "round": round,
            "error": type(error).__name__,
            "reason": one_line(error),
            "where": where,
            "time": when,
        },
    )


def forget_failure(path: Path) -> None:
    for name in (FAILURE, TRACEBACK):
        (path / name).unlink(missing_ok=True)


def one_line(error: Exception) -> str:
    """What is wrong, and on which line of code, where it is not Holdfast's own."""
    said = " ".join(str(error).split())
    said = said if len(said) <= 300 else said[:297] + "..."
    if isinstance(error, HoldfastError):
        return said
    return (f"{type(error).__name__}: {said}" if said else type(error).__name__) + in_brackets(error)
