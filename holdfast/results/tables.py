"""What a run recorded of its clients in every round, as data frames over all rounds: `run.tables` and
`run.table(name)`.

A round's arrays say nothing of what their rows are; that is known here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.core.progress import progress
from holdfast.storage.store import Store

_TABLES, _SCORES = "verdict/tables/", "verdict/scores/"


@dataclass(frozen=True)
class Known:
    """A table with a meaning of its own. Names of axes are arrays that hold ids, after `verdict/tables/`;
    `{}` is the part of the name that varies, since a second detector of a kind has a name of its own."""

    about: str
    rows: str = ""
    columns: str = ""
    kind: str = "clients"
    """clients: a number each; pairs: a number for two; classes: a client's peer for each class; members: ids;
    number: one for all."""


KNOWN = {
    "norms": Known("length of each client's update, calibrated where the method calibrates"),
    "norms/sent": Known("length of each client's update as it was sent, before it was calibrated"),
    "weights": Known("weight that the aggregation rule gave each client"),
    "fim": Known("trace of the Fisher information (t-FIM) that each client reported"),
    "alpha": Known("weight of each client by its t-FIM, before the aggregation rule"),
    "customisation": Known(
        "how much of each pooled model each client was given", "cohort", "customisation/pool", "pairs"
    ),
    "attention": Known(
        "how much of each other client's last model each client was given", "", "attended", "pairs"
    ),
    "matches": Known("whose model each client was given for a class (-2: nobody was found)", kind="classes"),
    "{}/accuracy": Known("the committee's score of each client's model", "{}/ids"),
    "{}/admitted": Known("1 where the committee let a client's model pass", "{}/ids"),
    "{}/votes": Known("what each member (client) scored each model (other)", "{}/members", "{}/ids", "pairs"),
    "{}/total": Known("contribution of each client so far, by which members are elected", "{}/clients"),
    "{}/members": Known("who sat on the committee", kind="members"),
    "{}/threshold": Known("the score that a model had to reach", kind="number"),
    "{}/next_threshold": Known("the score that a model will have to reach in the next round", kind="number"),
}
SHARES = (
    "weights",
    "alpha",
    "customisation",
    "attention",
    "accuracy",
    "admitted",
    "votes",
    "threshold",
    "next_threshold",
    "error",
)
"""Last parts of the names of tables whose values are shares of one: shown in per cent."""
MIXED = ("customisation", "attention")
"""Matrices that say of whose models each client's own one was mixed: rows and columns are clients."""
_AXES = (
    "customisation/pool",
    "attended",
    "{}/ids",
    "{}/clients",
)  # ids of rows or columns: no tables of their own


@dataclass(frozen=True)
class Told:
    """One round's table, and whose its rows and columns are; none where nobody can say."""

    values: np.ndarray
    kind: str
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None


def told_in(arrays: Mapping[str, Tensor]) -> dict[str, Told]:
    """All tables of one round, by name. Over many rounds a matrix for every two clients would fill the
    memory: so read, round by round, only what is needed of them stays."""
    return {name: _told(name, values, arrays) for name, values in _named(arrays).items()}


def about(name: str) -> str:
    """What a table is, in words."""
    known = _known(name)
    return known.about if known else _of_score(name) or "recorded by the method or a detector"


def tables_of(store: Store, last: int) -> dict[str, str]:
    """Name and meaning of each table that any of the rounds has."""
    found: dict[str, str] = {}
    for _, arrays in _rounds(store, last):
        for name in _named(arrays):
            if name not in found:
                found[name] = about(name)
    order = list(KNOWN)
    found = dict(
        sorted(
            found.items(),
            key=lambda item: next((i for i, p in enumerate(order) if _fits(item[0], p)), len(order)),
        )
    )
    parts = store.parts(last)
    if any(part.get("banned") or part.get("rejected") for part in parts):
        found["turned-away"] = "who was banned for good or rejected for a round, and why"
    if parts:
        found |= {
            "seconds": "where the time of each round went",
            "bytes": "what clients sent (up) and received (down) in each round",
        }
    return found


def table_of(
    store: Store, last: int, name: str, malicious: Mapping[str, Any] | list[int], where: str
) -> pd.DataFrame:
    """One table over all rounds; `malicious` as the manifest has it."""
    if name in _OF_PARTS:
        return _OF_PARTS[name](store, last, malicious)
    frames = []
    for round, arrays in _rounds(store, last):
        values = _named(arrays).get(name)
        if values is None:
            continue
        frame = _frame(_told(name, values, arrays))
        frame.insert(0, "round", round)
        if "client" in frame:
            frame.insert(2, "malicious", frame["client"].isin(attackers(malicious, arrays)))
        frames.append(frame)
    if not frames:
        there = ", ".join(tables_of(store, last)) or "none: no round was played"
        raise ConfigError(f"{where} has no table '{name}'; it has {there}")
    return pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)


def _told(name: str, values: Tensor, arrays: Mapping[str, Tensor]) -> Told:
    known = _known(name) or Known("")
    varies = name.rsplit("/", 1)[0]
    kind = known.kind if values.ndim else "number"
    values = values.double() if values.is_floating_point() or values.dtype == torch.bool else values
    if kind == "members":
        return Told(values.numpy(), kind, values.numpy())
    rows = _ids(arrays, known.rows.replace("{}", varies), len(values) if values.ndim else 1)
    if kind == "number" or rows is None:  # a number for everybody, or rows that nobody can name
        return Told(values.flatten().numpy(), "number")
    if values.ndim == 1:
        return Told(values.numpy(), "clients", rows)
    flat = values.flatten(1)
    columns = _ids(arrays, known.columns.replace("{}", varies), flat.shape[1]) if known.columns else None
    return Told(
        flat.numpy(),
        "classes" if kind == "classes" else "pairs",
        rows,
        np.arange(flat.shape[1]) if columns is None else columns,
    )


def _frame(told: Told) -> pd.DataFrame:
    values, rows, across = told.values, told.rows, told.columns
    if told.kind == "members":
        return pd.DataFrame({"client": rows})
    if rows is None:
        return pd.DataFrame({"value": values})
    if across is None:
        return pd.DataFrame({"client": rows, "value": values}).dropna(ignore_index=True)
    word = "class" if told.kind == "classes" else "other"
    frame = pd.DataFrame(
        {"client": rows.repeat(len(across)), word: np.tile(across, len(rows)), "value": values.flatten()}
    )
    frame = frame[frame["value"] != -1] if told.kind == "classes" else frame  # what was not wanted
    return frame.dropna().reset_index(drop=True)


def _ids(arrays: Mapping[str, Tensor], axis: str, length: int) -> np.ndarray | None:
    """Whose the rows are: those of the named array, else those the server had a verdict on."""
    for name in (axis, _TABLES + axis, "verdict/ids"):
        if name in arrays and len(arrays[name]) == length:
            return arrays[name].numpy()
    return None


def _named(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A round's tables by the names that users see."""
    out = {name.removeprefix(_TABLES): value for name, value in arrays.items() if name.startswith(_TABLES)}
    out = {name: value for name, value in out.items() if not any(_fits(name, axis) for axis in _AXES)}
    out |= {
        f"scores/{name.removeprefix(_SCORES)}": value
        for name, value in arrays.items()
        if name.startswith(_SCORES)
    }
    return out | ({"weights": arrays["verdict/weights"]} if "verdict/weights" in arrays else {})


def _known(name: str) -> Known | None:
    return next((known for pattern, known in KNOWN.items() if _fits(name, pattern)), None)


def _fits(name: str, pattern: str) -> bool:
    """`committee/members` and `committee-2/members` fit `{}/members`."""
    return (
        name == pattern
        or pattern.startswith("{}")
        and name.startswith("committee")
        and name.rsplit("/", 1)[-1] == pattern[3:]
    )


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


def attackers(told: Mapping[str, Any] | list[int], arrays: Mapping[str, Tensor]) -> list[int]:
    """Of one round, where they are drawn anew for each."""
    return told if isinstance(told, list) else arrays.get("malicious", torch.zeros(0)).tolist()


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
