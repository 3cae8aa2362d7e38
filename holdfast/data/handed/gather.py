"""Read what is handed over, for all clients or for one dataset, into one sample store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.core.errors import ConfigError, DataError, in_print
from holdfast.data.handed.content import Content
from holdfast.data.handed.encode import Encoding, encode
from holdfast.data.handed.entries import Piece, Reading, is_dataset, read_entry
from holdfast.data.handed.labels import number_labels, warn_of_unseen
from holdfast.data.handed.values import values_of


@dataclass(frozen=True)
class Gathered:
    """Samples and labels piece by piece: for training and, where there is one, a test set for each."""

    train: list[Piece]
    tests: list[Piece | None]
    names: tuple[str, ...] = ()  # of the clients, or of the users
    users: np.ndarray | None = None  # of each row: the client it was given for, or its user

    def content(self, classes: int | Sequence[str] | None, how: Encoding) -> Content:
        """One store: all rows for training, client by client, then all test sets."""
        tests = [piece for piece in self.tests if piece is not None]
        pieces = [*self.train, *tests]
        labels, count, class_names = number_labels(pieces, classes)
        split = len(self.train)
        if split > 1 or len(tests) > 1:
            warn_of_unseen(
                list(zip(self.train, labels, strict=False)),
                list(zip(tests, labels[split:], strict=True)),
                class_names,
            )
        x, kind, mean, std = encode(pieces, split, how)
        y = np.ascontiguousarray(np.concatenate(labels) if len(labels) > 1 else labels[0])
        rows = sum(map(len, self.train))
        return Content(x, y, self.users, kind, count, class_names, rows, mean, std)


def gather_dataset(X: Any, y: Any, test: Any, users: Any, how: Reading) -> Gathered:
    """One dataset, which a partition will divide."""
    if y is None and not is_dataset(X):
        raise ConfigError(
            "holdfast.Data: X needs y, its labels; for one entry for each client write"
            " holdfast.Data(clients=[...])"
        )
    train, own = read_entry(X if y is None else (X, y), test, "the dataset", how)
    if users is None:
        return Gathered([train], [own])
    names, numbers = _numbered(users, len(train), own)
    return Gathered([train], [own], names, numbers)


def _numbered(users: Any, train: int, test: Piece | None) -> tuple[tuple[str, ...], np.ndarray]:
    """The names of the users, where they are words, and the number of each row's user."""
    values = values_of(users, "the dataset", "users")
    rows = train + (0 if test is None else len(test))
    if len(values) != rows:
        also = "" if test is None else ", those of the test set included"
        raise DataError(f"data: there are {len(values):,} users for {rows:,} samples{also}")
    found, numbers = np.unique(np.asarray(values), return_inverse=True)
    names = tuple(map(str, found)) if found.dtype.kind == "U" else ()
    return names, numbers.reshape(-1).astype(np.int64)


def gather_clients(entries: Any, names: Sequence[str] | None, test: Any, how: Reading) -> Gathered:
    """One entry for each client, from a list or a map of names."""
    if isinstance(entries, Mapping):
        if names is not None:
            raise ConfigError("names: the clients have names already, the keys of the map; leave names out")
        names, entries = [str(name) for name in entries], list(entries.values())
    entries = list(entries)
    if not entries:
        raise ConfigError("data: there are no clients; give an entry for each")
    named = check_names(names, len(entries))
    tests = _tests(test, named, len(entries))
    train, own = [], []
    for place, (entry, held_back) in enumerate(zip(entries, tests, strict=True)):
        where = f"client '{in_print(named[place])}'" if named else f"client {place}"
        mine, tested = read_entry(entry, held_back, where, how)
        train.append(mine)
        own.append(tested)
    owners = np.concatenate(
        [np.full(len(piece), client, np.int64) for client, piece in enumerate(train)]
        + [np.full(len(piece), client, np.int64) for client, piece in enumerate(own) if piece is not None]
    )
    return Gathered(train, own, named, owners)


def _tests(test: Any, names: tuple[str, ...], clients: int) -> list[Any]:
    """A test set for each client, or None for those that have none."""
    if test is None:
        return [None] * clients
    if isinstance(test, Mapping):
        strange = [str(name) for name in test if str(name) not in names]
        if strange:
            raise ConfigError(f"test: there is no client '{strange[0]}'")
        by_name = {str(name): given for name, given in test.items()}
        return [by_name.get(name) for name in names]
    if not isinstance(test, (list, tuple)) or len(test) != clients:
        many = f"{len(test)} entries" if isinstance(test, (list, tuple)) else type(test).__name__
        raise ConfigError(f"test: give one test set (or None) for each of the {clients} clients, not {many}")
    return list(test)


def check_names(names: Sequence[str] | None, clients: int | None) -> tuple[str, ...]:
    if names is None:
        return ()
    found = tuple(map(str, names))
    if clients is not None and len(found) != clients:
        raise ConfigError(f"names: {len(found)} names for {clients} clients")
    return found
