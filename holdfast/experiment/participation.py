"""Participation: which clients are registered, banned or available, and which are drawn for a round. It uses
only what a real server knows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.reading import parse_json, read_whole
from holdfast.core.types import State

Intervals = dict[int, list[tuple[int, int]]]


@dataclass
class Participation:
    """All clients that may train; bans are permanent."""

    clients: Tensor
    key: Key
    participation: float = 1.0
    availability: float | Intervals = 1.0
    banned: dict[int, str] = field(default_factory=dict)
    draws_banned: bool = False
    """Whether banned clients are still drawn: some released code does so, and ignores their replies."""
    pardoned: set[int] = field(default_factory=set)
    """Clients that the operator of a federation has admitted again: their bans are not restored."""

    def available(self, round: int) -> Tensor:
        """The clients that are registered, not banned, and available in this round; sorted."""
        ids = self.clients
        if self.banned and not self.draws_banned:
            ids = ids[~torch.isin(ids, torch.tensor(list(self.banned), dtype=torch.int64))]
        if isinstance(self.availability, float):
            if self.availability >= 1.0:
                return ids
            return ids[self.key.fold("available", round).fold(ids).uniform() < self.availability]
        spans = self.availability
        there = [
            c not in spans or any(start <= round < stop for start, stop in spans[c]) for c in ids.tolist()
        ]
        return ids[torch.tensor(there, dtype=torch.bool)]

    def cohort(self, round: int, available: Tensor) -> Tensor:
        """The clients drawn for this round: those with the smallest hash, so that a client's luck does not
        depend on the others' order."""
        if self.participation >= 1.0 or not len(available):
            return available
        wanted = min(self.cohort_size(), len(available))
        luck = self.key.fold("cohort", round).fold(available).bits
        drawn = available[
            luck <= luck.kthvalue(wanted).values
        ]  # by selection: of many thousands only these few have to be in order
        return (
            drawn
            if len(drawn) == wanted
            else available[torch.argsort(luck, stable=True)[:wanted]].sort().values
        )

    def cohort_size(self) -> int:
        """How many clients are drawn when all are available."""
        return cohort_size(self.participation, len(self.clients))

    def ban(self, clients: dict[int, str]) -> None:
        for client, reason in clients.items():
            self.banned.setdefault(client, reason)
            self.pardoned.discard(client)

    def pardon(self, clients: set[int]) -> None:
        self.pardoned |= clients
        for client in clients:
            self.banned.pop(client, None)

    def state(self) -> State:
        """The bans for a commit: ids, and the reasons as bytes of JSON."""
        ids = sorted(self.banned)
        reasons = json.dumps([self.banned[c] for c in ids]).encode()
        return {
            "roster/banned": torch.tensor(ids, dtype=torch.int64),
            "roster/reasons": torch.frombuffer(bytearray(reasons), dtype=torch.uint8),
        }

    def restore(self, state: State) -> None:
        reasons = parse_json(bytes(state["roster/reasons"].tolist()))
        restored = dict(zip(state["roster/banned"].tolist(), reasons, strict=True))
        self.banned = {c: reason for c, reason in restored.items() if c not in self.pardoned} | self.banned


def cohort_size(participation: float, clients: int) -> int:
    return max(1, round_half_up(participation * clients))


def round_half_up(x: float) -> int:
    return int(x + 0.5)


def read_availability(
    given: float | str | dict[str, list[tuple[int, int]]], clients: int
) -> float | Intervals:
    """Read a probability, or per client the rounds [from, to) in which it is available; clients that are not
    named always are."""
    if isinstance(given, str):
        try:
            table = parse_json(read_whole(Path(given)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"train.availability: {given} cannot be read as JSON: {error}") from None
        if not isinstance(table, dict):
            raise ConfigError(
                f"train.availability: {given} must hold an object {{client: [[from, to], ...]}}"
            )
        given = table
    if isinstance(given, (int, float)):
        if not 0 < given <= 1:
            raise ConfigError(f"train.availability: a probability must be in (0, 1], got {given}")
        return float(given)
    spans: Intervals = {}
    for client, intervals in given.items():
        try:
            spans[int(client)] = [(int(start), int(stop)) for start, stop in intervals]
        except (TypeError, ValueError):
            raise ConfigError(
                f"train.availability: client '{client}' needs a list of [from, to] rounds"
            ) from None
        if not 0 <= int(client) < clients:
            raise ConfigError(f"train.availability: no client {client}; there are {clients}, from 0")
    return spans
