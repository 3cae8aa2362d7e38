"""What one run recorded, as small arrays: a row per client, a column per round.

A page cannot show a thousand clients or a thousand rounds. This module chooses the ones that are shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.progress import progress
from holdfast.detectors.base import named
from holdfast.report.axis import round_step, shorten
from holdfast.report.read_runs import RunRecord
from holdfast.results.tables import DeclaredTables, RoundTable, attackers, tables_in

MOST_CLIENTS, MOST_ROUNDS, MOST_FRAMES = 60, 100, 25
_NAME = 14  # letters of a client's name
_OF_PAIRS = 40  # clients of a matrix, which has that many columns too


@dataclass(frozen=True, eq=False)
class Frame:
    """A matrix of one round, of the clients that are shown."""

    round: int
    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    foul: float = math.nan
    """What the columns of attackers make up of the rows of benign clients, of all and not only of those
    shown."""


@dataclass(eq=False)
class RunData:
    """`clients` are those shown, attackers first where they stay the same, and `rounds` those shown that have
    a verdict."""

    clients: list[int]
    everyone: int
    """How many clients there are."""
    rounds: list[int]
    committed: int
    bad: np.ndarray
    """[clients, rounds], bool."""
    malicious: frozenset[int] = frozenset()
    """Clients that attack in every round, shown or not; empty where attackers are drawn anew in every
    round."""
    grids: dict[str, np.ndarray] = field(default_factory=dict)
    """By table, [clients, rounds]; NaN where nothing was recorded."""
    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    """By table, one for each round."""
    frames: dict[str, list[Frame]] = field(default_factory=dict)
    """By table, matrices of some rounds."""
    members: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    """By table and round."""
    matches: dict[int, Frame] = field(default_factory=dict)
    """By round: a row per client, a column per class."""
    banned: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Round and reason, of all clients."""
    rejected: dict[tuple[int, int], str] = field(default_factory=dict)
    """By client and round, of all clients and rounds."""
    accuracy: dict[int, dict[int, float]] = field(default_factory=dict)
    """By evaluated round and client, of the model that is deployed."""
    names: tuple[str, ...] = ()
    """Of the clients, where they have names."""
    declared: DeclaredTables = field(default_factory=DeclaredTables)
    """What parts declare of the tables that they record."""

    @property
    def attackers(self) -> int:
        """How many of the clients shown, the first ones, attack in every round."""
        return sum(client in self.malicious for client in self.clients)

    @property
    def redrawn(self) -> bool:
        """Whether clients attack in some rounds only."""
        return bool(self.bad.any()) and not self.malicious

    def mark(self, client: int) -> str:
        """A client's name: attackers have a triangle, which needs no colour."""
        name = shorten(self.name(client), _NAME)
        return f"▲ {name}" if client in self.malicious else name

    def name(self, client: int) -> str:
        return self.names[client] if client < len(self.names) else str(client)

    def of_pairs(self) -> list[int]:
        """The clients of a matrix: all, or as many as fit, of both kinds; then without those who were banned
        before there was one."""
        if len(self.clients) <= _OF_PAIRS:
            return self.clients
        there = [
            client
            for client in self.clients
            if client not in self.banned or self.banned[client][0] > self.rounds[0]
        ]
        bad = [client for client in there if client in self.malicious][: _OF_PAIRS // 2]
        return bad + [client for client in there if client not in self.malicious][: _OF_PAIRS - len(bad)]


def read_run_data(record: RunRecord) -> RunData | None:
    """Read what a run recorded; None where no round is finished."""
    verdicts = _some_rounds(
        min(record.round, record.rounds)
    )  # what comes after the last round, to conclude, has none
    measured = evenly([p["round"] for p in record.parts if _evaluated(p)], MOST_ROUNDS // 2)
    wanted = sorted({*verdicts, *measured})
    told: dict[int, Mapping[str, Tensor]] = {}
    with progress("reading rounds", len(wanted)) as advance:
        for round in wanted:
            arrays = record.run.store.arrays(round)
            told[round] = {
                name: value
                for name, value in arrays.items()
                if value.ndim < 2
                or record.run.declared_tables.kind(name.removeprefix("verdict/tables/")) == "classes"
            }
            advance(1)
    if not any(told.values()):
        return None
    run_data = _begun(record, [round for round in verdicts if "verdict/ids" in told.get(round, {})], told)
    _read_decisions(run_data, record.parts)
    _read_verdicts(run_data, told)
    _read_frames(run_data, record)
    for round in measured:
        run_data.accuracy[round] = _accuracy(told.get(round, {}), str(record.protocol["deployed"]))
    _read_bounds(run_data, record, told)
    return run_data


def _some_rounds(last: int) -> list[int]:
    """The first and the last, and of many every second, fifth, tenth: round numbers read best."""
    step = round_step(last / MOST_ROUNDS)
    return sorted({1, *range(step, last + 1, step), last} & set(range(1, last + 1)))


def evenly(items: Sequence[int], most: int) -> list[int]:
    """Some of them, the first and the last always among these."""
    if len(items) <= most:
        return list(items)
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))]


def _begun(record: RunRecord, rounds: list[int], told: Mapping[int, Mapping[str, Tensor]]) -> RunData:
    malicious = record.manifest["malicious"]
    ids = [
        arrays[name]
        for arrays in told.values()
        for name in ("cohort", "evaluate/ids", "verdict/ids")
        if name in arrays
    ]
    known = (
        [i for i in torch.cat(ids).unique().tolist() if i >= 0] if ids else []
    )  # the server's own pseudo-client is below
    bad = [client for client in known if client in malicious] if isinstance(malicious, list) else []
    away = {
        int(client)
        for part in record.parts
        for client in {**part.get("banned", {}), **part.get("rejected", {})}
    }
    clients = _chosen(known, bad, away)
    truth = [set(attackers(malicious, told[round])) for round in rounds]
    marks = np.array([[client in now for now in truth] for client in clients], dtype=bool).reshape(
        len(clients), len(rounds)
    )
    declared = record.run.declared_tables
    return RunData(
        clients,
        len(known),
        rounds,
        record.round,
        marks,
        frozenset(bad),
        declared=declared,
        names=record.run.client_names,
    )


def _chosen(known: Sequence[int], bad: Sequence[int], away: Iterable[int]) -> list[int]:
    """The clients to show, attackers first. Of too many, at most half are attackers, and of the others those
    that the server banned or rejected come first."""
    benign = [client for client in known if client not in set(bad)]
    if len(known) <= MOST_CLIENTS:
        return [*bad, *benign]
    bad = evenly(bad, MOST_CLIENTS // 2)
    room = MOST_CLIENTS - len(bad)
    suspects = evenly([client for client in benign if client in set(away)], room // 2)
    others = evenly([client for client in benign if client not in set(suspects)], room - len(suspects))
    return [*bad, *sorted([*suspects, *others])]


def _read_verdicts(run_data: RunData, told: Mapping[int, Mapping[str, Tensor]]) -> None:
    row = {client: place for place, client in enumerate(run_data.clients)}
    for place, round in enumerate(run_data.rounds):
        for name, table in tables_in(told[round], run_data.declared).items():
            if table.kind == "number":
                _put_number(run_data, name, place, table)
            elif table.kind == "members":
                run_data.members.setdefault(name, {})[round] = [int(i) for i in table.values]
            elif table.kind == "clients" and table.rows is not None:
                grid = run_data.grids.setdefault(name, np.full((len(row), len(run_data.rounds)), np.nan))
                for client, value in zip(table.rows.tolist(), table.values.tolist(), strict=True):
                    if client in row:
                        grid[row[client], place] = value
            elif table.kind == "classes" and table.rows is not None and table.columns is not None:
                run_data.matches[round] = Frame(round, table.rows, table.columns, table.values)


def _read_frames(run_data: RunData, record: RunRecord) -> None:
    """Round by round: matrices of all rounds, of all clients, may be larger than the memory."""
    shown = run_data.of_pairs()
    for round in _framed(run_data):
        for name, table in tables_in(record.run.store.arrays(round), run_data.declared).items():
            if table.kind != "pairs" or table.rows is None or table.columns is None or not table.values.size:
                continue
            kind = run_data.declared.kind(name)
            rows = np.isin(table.rows, shown) | (kind == "votes")  # of members all
            columns = (
                np.isin(table.columns, shown)
                if kind in ("mixture", "votes")  # whose columns are clients
                else np.arange(len(table.columns)) < MOST_CLIENTS
            )
            foul = _foul(table.values, table.rows, table.columns, run_data.malicious)
            frame = Frame(
                round, table.rows[rows], table.columns[columns], table.values[rows][:, columns], foul
            )
            run_data.frames.setdefault(name, []).append(frame)


def _foul(values: np.ndarray, rows: np.ndarray, columns: np.ndarray, malicious: frozenset[int]) -> float:
    benign = ~np.isin(rows, list(malicious)) & (values.sum(1) > 0)  # a row of zeros is not a mixture
    of_attackers = values[benign][:, np.isin(columns, list(malicious))].sum(1)
    return float(of_attackers.mean()) if len(of_attackers) else math.nan


def _framed(run_data: RunData) -> list[int]:
    """The rounds that a slider has: the first ones and those of bans, in which much changes, and the others
    evenly."""
    telling = {*run_data.rounds[:3], *(when for when, _ in run_data.banned.values())} & set(run_data.rounds)
    chosen = evenly(sorted(telling), MOST_FRAMES // 3)
    return sorted(
        {
            *chosen,
            *evenly([round for round in run_data.rounds if round not in chosen], MOST_FRAMES - len(chosen)),
        }
    )


def _put_number(run_data: RunData, name: str, place: int, table: RoundTable) -> None:
    if len(table.values) == 1:
        run_data.numbers.setdefault(name, np.full(len(run_data.rounds), np.nan))[place] = float(
            table.values[0]
        )


def _read_decisions(run_data: RunData, parts: Sequence[Mapping[str, Any]]) -> None:
    for part in parts:
        for client, reason in part.get("banned", {}).items():
            run_data.banned.setdefault(int(client), (part["round"], str(reason)))
        for client, reason in part.get("rejected", {}).items():
            run_data.rejected[int(client), part["round"]] = str(reason)


def _evaluated(part: Mapping[str, Any]) -> bool:
    return any(name.startswith("accuracy") and value is not None for name, value in part["metrics"].items())


def _accuracy(arrays: Mapping[str, Tensor], model: str) -> dict[int, float]:
    """Of every client that has test samples."""
    right = arrays.get(f"evaluate/test/{model}/correct")
    if right is None:
        return {}
    rows = zip(
        arrays["evaluate/ids"].tolist(), right.tolist(), arrays["evaluate/test/total"].tolist(), strict=True
    )
    return {int(client): float(n / total) for client, n, total in rows if total > 0}


def _read_bounds(run_data: RunData, record: RunRecord, told: Mapping[int, Mapping[str, Tensor]]) -> None:
    """The largest scores that detectors accept, which are not recorded: they follow from the settings and
    from all scores."""
    if not any(name.startswith("scores/") for name in run_data.grids):
        return
    try:
        parts = record.run.parts_config.parts()
    except HoldfastError:  # objects that the manifest cannot name
        return
    for name, detector in named((*parts.method.detectors(), *parts.detectors)):
        under = f"verdict/scores/{name}/"
        for place, round in enumerate(run_data.rounds):
            scores = {k.removeprefix(under): v for k, v in told[round].items() if k.startswith(under)}
            for score, bound in (detector.bounds(scores) if scores else {}).items():
                bounds = run_data.numbers.setdefault(
                    f"scores/{name}/{score}/bound", np.full(len(run_data.rounds), np.nan)
                )
                bounds[place] = bound
