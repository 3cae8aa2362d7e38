"""What a run recorded of its clients in every round, as data frames over all rounds: `run.tables` and
`run.table(name)`.

A round's arrays do not say what their rows are: the parts that record them declare it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.core.progress import progress
from holdfast.core.recorded_table import COMMON, RecordedTable
from holdfast.core.registry import parts
from holdfast.storage.store import Store

_TABLES, _SCORES = "verdict/tables/", "verdict/scores/"


class DeclaredTables:
    """The tables that registered parts declare, found by the names under which a run records them. Where two
    methods use the same name, the run's own method counts."""

    def __init__(self, method: str | None = None):
        methods = parts("method")
        first = [methods.pop(method)] if method in methods else []
        self._plain = dict(COMMON)
        for part in (*first, *methods.values()):
            for name, table in part.tables.items():
                self._plain.setdefault(name, table)
        ids = {"ids": RecordedTable("clients that the detector judged", kind="ids")}
        self._of_detectors = {name: {**part.tables, **ids} for name, part in parts("detector").items()}

    def find(self, name: str) -> RecordedTable | None:
        """The declaration of a table; `committee-2/votes` is one of the second committee's."""
        if name in self._plain:
            return self._plain[name]
        detector, _, table = name.removeprefix("scores/").rpartition("/")
        return self._tables_of(detector).get(table)

    def kind(self, name: str) -> str:
        found = self.find(name)
        return found.kind if found else "clients"

    def share(self, name: str) -> bool:
        """Whether values are shares of one."""
        found = self.find(name)
        return found is not None and found.share

    def about(self, name: str) -> str:
        """What a table is, in words."""
        found = self.find(name)
        return found and found.about or _of_score(name) or "recorded by the method or a detector"

    def title(self, name: str) -> str:
        """The title of its picture."""
        found = self.find(name)
        return found and found.title or name.removeprefix("scores/")

    def titled(self) -> list[str]:
        """The names of the tables that have titles of their own, common ones first."""
        return [name for name, table in self._plain.items() if table.title]

    def place(self, name: str) -> tuple[int, int, int]:
        """Where it comes in a list of tables: those of methods with `norms/sent` beside `norms`, those of
        detectors, the others."""
        order = list(self._plain)
        if name in order:
            first = name.partition("/")[0]
            return 0, order.index(first if first in order else name), order.index(name)
        own = self._tables_of(name.rpartition("/")[0])
        table = name.rpartition("/")[2]
        return (1, list(own).index(table), 0) if table in own else (2, 0, 0)

    def _tables_of(self, detector: str) -> Mapping[str, RecordedTable]:
        """By its name in the verdict: the second of a kind is "norm-2"."""
        return self._of_detectors.get(detector) or self._of_detectors.get(re.sub(r"-\d+$", "", detector), {})


@dataclass(frozen=True)
class RoundTable:
    """One round's table, and whose its rows and columns are; None where that is not known."""

    values: np.ndarray
    kind: str
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None


def tables_in(arrays: Mapping[str, Tensor], declared: DeclaredTables) -> dict[str, RoundTable]:
    """All tables of one round, by name. Over many rounds a matrix for every two clients would fill the
    memory: so read, round by round, only what is needed of them stays."""
    return {name: _table(name, values, arrays, declared) for name, values in _named(arrays, declared).items()}


def tables_of(store: Store, last: int, declared: DeclaredTables) -> dict[str, str]:
    """Name and meaning of each table that any of the rounds has."""
    found: dict[str, str] = {}
    for _, arrays in _rounds(store, last):
        for name in _named(arrays, declared):
            if name not in found:
                found[name] = declared.about(name)
    found = dict(sorted(found.items(), key=lambda item: declared.place(item[0])))
    rounds = store.parts(last)
    if any(part.get("banned") or part.get("rejected") for part in rounds):
        found["turned-away"] = "who was banned for good or rejected for a round, and why"
    if rounds:
        found |= {
            "seconds": "where the time of each round went",
            "bytes": "what clients sent (up) and received (down) in each round",
        }
    return found


def table_of(
    store: Store,
    last: int,
    name: str,
    malicious: Mapping[str, Any] | list[int],
    where: str,
    declared: DeclaredTables,
) -> pd.DataFrame:
    """One table over all rounds; `malicious` as the manifest has it."""
    if name in _OF_PARTS:
        return _OF_PARTS[name](store, last, malicious)
    frames = []
    for round, arrays in _rounds(store, last):
        values = _named(arrays, declared).get(name)
        if values is None:
            continue
        frame = _frame(_table(name, values, arrays, declared))
        frame.insert(0, "round", round)
        if "client" in frame:
            frame.insert(2, "malicious", frame["client"].isin(attackers(malicious, arrays)))
        frames.append(frame)
    if not frames:
        there = ", ".join(tables_of(store, last, declared)) or "none: no round has run"
        raise ConfigError(f"{where} has no table '{name}'; it has {there}")
    return pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)


def _table(name: str, values: Tensor, arrays: Mapping[str, Tensor], declared: DeclaredTables) -> RoundTable:
    known = declared.find(name) or RecordedTable("")
    under = "".join(name.rpartition("/")[:2])
    kind = known.kind if values.ndim else "number"
    values = values.double() if values.is_floating_point() or values.dtype == torch.bool else values
    if kind == "members":
        return RoundTable(values.numpy(), kind, values.numpy())
    rows = _ids(arrays, known.rows, under, len(values) if values.ndim else 1)
    if kind == "number" or rows is None:  # one for the round, or rows whose ids are not known
        return RoundTable(values.flatten().numpy(), "number")
    if values.ndim == 1:
        return RoundTable(values.numpy(), "clients", rows)
    flat = values.flatten(1)
    columns = _ids(arrays, known.columns, under, flat.shape[1]) if known.columns else None
    return RoundTable(
        flat.numpy(),
        "classes" if kind == "classes" else "pairs",
        rows,
        np.arange(flat.shape[1]) if columns is None else columns,
    )


def _frame(table: RoundTable) -> pd.DataFrame:
    values, rows, across = table.values, table.rows, table.columns
    if table.kind == "members":
        return pd.DataFrame({"client": rows})
    if rows is None:
        return pd.DataFrame({"value": values})
    if across is None:
        return pd.DataFrame({"client": rows, "value": values}).dropna(ignore_index=True)
    word = "class" if table.kind == "classes" else "other"
    frame = pd.DataFrame(
        {"client": rows.repeat(len(across)), word: np.tile(across, len(rows)), "value": values.flatten()}
    )
    frame = frame[frame["value"] != -1] if table.kind == "classes" else frame  # what was not wanted
    return frame.dropna().reset_index(drop=True)


def _ids(arrays: Mapping[str, Tensor], axis: str, under: str, length: int) -> np.ndarray | None:
    """Whose the rows are: those of the named array, which lies beside a detector's table, else those on which
    the server had a verdict."""
    for name in (f"{_TABLES}{under}{axis}", axis, _TABLES + axis, "verdict/ids"):
        if name in arrays and len(arrays[name]) == length:
            return arrays[name].numpy()
    return None


def _named(arrays: Mapping[str, Tensor], declared: DeclaredTables) -> dict[str, Tensor]:
    """A round's tables by the names that users see."""
    out = {name.removeprefix(_TABLES): value for name, value in arrays.items() if name.startswith(_TABLES)}
    out = {name: value for name, value in out.items() if declared.kind(name) != "ids"}
    out |= {
        f"scores/{name.removeprefix(_SCORES)}": value
        for name, value in arrays.items()
        if name.startswith(_SCORES)
    }
    return out | ({"weights": arrays["verdict/weights"]} if "verdict/weights" in arrays else {})


def _of_score(name: str) -> str:
    who = name.removeprefix("scores/").rsplit("/", 1)
    return (
        f"suspicion of each client by the detector {who[0]}: more is worse"
        if name.startswith("scores/")
        else ""
    )


def _rounds(store: Store, last: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    rounds = store.rounds(last)
    with progress("reading rounds", len(rounds)) as advance:
        for round in rounds:
            arrays = store.arrays(round)
            if arrays:
                yield round, arrays
            advance(1)


def attackers(malicious: Mapping[str, Any] | list[int], arrays: Mapping[str, Tensor]) -> list[int]:
    """The attackers of a round; `malicious` as the manifest has it, which says so where they are redrawn."""
    return malicious if isinstance(malicious, list) else arrays.get("malicious", torch.zeros(0)).tolist()


def _turned_away(store: Store, last: int, malicious: Mapping[str, Any] | list[int]) -> pd.DataFrame:
    rows = []
    for part in store.parts(last):
        bad = set(attackers(malicious, {} if isinstance(malicious, list) else store.arrays(part["round"])))
        for how in ("banned", "rejected"):
            for client, reason in part.get(how, {}).items():
                rows.append(
                    {
                        "round": part["round"],
                        "client": int(client),
                        "malicious": int(client) in bad,
                        "how": how,
                        "reason": reason,
                    }
                )
    return pd.DataFrame(rows, columns=["round", "client", "malicious", "how", "reason"])


def _seconds(store: Store, last: int, _: Any) -> pd.DataFrame:
    rows = [
        (part["round"], name, spent)
        for part in store.parts(last)
        for name, spent in part.get("seconds", {}).items()
    ]
    return pd.DataFrame(rows, columns=["round", "part", "value"])


def _bytes(store: Store, last: int, _: Any) -> pd.DataFrame:
    ways = ("up", "down")
    rows = [
        (part["round"], way, part["metrics"].get(f"bytes/{way}", 0))
        for part in store.parts(last)
        for way in ways
    ]
    return pd.DataFrame(rows, columns=["round", "part", "value"])


_OF_PARTS = {"turned-away": _turned_away, "seconds": _seconds, "bytes": _bytes}
