"""What all partitions share. A partition sees labels (and users) and returns positions; it never sees the
samples.

To add one: subclass Partition, register it under a name, and return one array of positions per client, no
position twice; or an Assignment, where there is more to record. If the samples cannot be assigned as asked,
raise a DataError of one line that names the setting to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.registry import Part, setting


@dataclass(frozen=True, eq=False)
class Assignment:
    """Which client holds what, with more than the lists of positions."""

    lists: Sequence[np.ndarray]
    # test sets: disjoint from all lists, but clients may share them; none: the lists are split, also those
    # of single clients
    tests: Sequence[np.ndarray | None] | None = None
    overlap: bool = False  # a position may be in the lists of several clients, but never twice in one
    # a whole number per client, such as its group
    facts: Mapping[str, np.ndarray] = field(default_factory=dict)


class Partition(Part):
    """The settings that every partition has."""

    per_user: ClassVar[bool] = False  # without data.clients there are as many clients as users, not 20
    own_tests: ClassVar[bool] = False  # the test rows of a user are the test set of its client
    samples_per_client: int | None = setting(
        None, "number of samples of a client; none: all samples are assigned", ge=1
    )

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> Sequence[np.ndarray] | Assignment:
        """Return positions in labels, one array per client."""
        raise TypeError(f"partition '{self.name}' does not implement __call__")

    def check_size(self, total: int, clients: int) -> None:
        """Raise an error for sizes that no assignment can have."""
        if clients > total:
            raise DataError(f"data.partition: {clients} clients but only {total} samples; lower data.clients")
        if self.samples_per_client and self.samples_per_client * clients > total:
            raise DataError(
                f"data.partition: {clients} clients x {self.samples_per_client} samples_per_client is more"
                f" than the {total} samples; lower samples_per_client or data.clients"
            )

    def sizes(self, total: int, clients: int) -> np.ndarray:
        """[clients]: samples_per_client, or equal shares of all samples."""
        self.check_size(total, clients)
        return (
            np.full(clients, self.samples_per_client, dtype=np.int64)
            if self.samples_per_client
            else even(total, clients)
        )


def even(total: int, parts: int) -> np.ndarray:
    """Return sizes that add up to total and differ by at most one."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def apportion(total: int, weights: np.ndarray, least: int = 0) -> np.ndarray:
    """Return whole numbers that add up to total, as nearly in proportion to weights as possible, none below
    `least`, which must fit."""
    weights = np.asarray(weights, dtype=np.float64)
    free = np.ones(len(weights), dtype=bool)
    # clients that would get too little get `least`, the others share the rest; each pass leaves fewer of
    # them, so it ends
    while True:
        rest = total - least * int((~free).sum())
        share = np.where(free, rest * (weights / weights[free].sum()), least)
        short = free & (share < least - 1e-9)
        if not short.any():
            break
        free &= ~short
    out = np.floor(share + 1e-9).astype(np.int64)
    order = np.lexsort((out - share, ~free))  # the largest remainders among the free ones come first
    out[order[: total - int(out.sum())]] += 1
    return out


def by_class(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Return the positions of each class that occurs, in label order, shuffled within a class."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def cut(positions: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    return [np.sort(piece) for piece in np.split(positions, np.cumsum(sizes)[:-1])]


def group_by_owner(
    positions: np.ndarray, owner: np.ndarray, clients: int, rng: np.random.Generator, cap: int | None = None
) -> list[np.ndarray]:
    """Group positions by owner; with a cap, keep a random choice of that many of each."""
    sizes = np.bincount(owner, minlength=clients)
    if cap is not None:
        mixed = rng.permutation(len(positions))
        order = mixed[np.argsort(owner[mixed], kind="stable")]
        rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        order, sizes = order[rank < cap], np.minimum(sizes, cap)
    else:
        order = np.argsort(owner, kind="stable")
    return cut(positions[order], sizes)
