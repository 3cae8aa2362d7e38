"""Groups of clients, each with its own group of classes."""

from __future__ import annotations

import numpy as np
from pydantic import field_validator

from holdfast.core.errors import DataError
from holdfast.core.registry import register, setting
from holdfast.data.partitions.base import Assignment, Partition, apportion, even

# digits, upper case, lower case, as EMNIST ByClass numbers them
_KNOWN = {"emnist": ("0-9", "10-35", "36-61")}
_MOST = 1_000_000  # classes in a range
Group = int | str | tuple[int | str, ...]


@register(
    "partition",
    "grouped",
    paper="Li et al.: FedCAP: Robust Federated Learning via Customized Aggregation, ACSAC 2024",
)
class Grouped(Partition):
    """Each client belongs to a group, which has classes of its own: most of the client's samples are of
    these, the rest of all classes.

    Groups are written as classes and ranges of them: groups = ["0-4", [5, 6, "8-9"]]. A number makes that
    many groups of consecutive classes; "emnist" means ["0-9", "10-35", "36-61"]: digits, upper case, lower
    case. Groups have clients in proportion to the number of their classes that occur, at least one; the group
    of a client is drawn, and is the fact `group`.

    Counts: the clients of a group have together as many samples as their classes have, divided as equally as
    possible, so all samples are assigned where every class is in a group; or samples_per_client each. Of a
    client's n samples, floor(n * (1 - share)) are drawn from what the groups leave over, the others from its
    group's classes.
    """

    share: float = setting(
        0.8, "share of a client's samples that are of its group's classes (FedCAP: 0.8)", ge=0, le=1
    )
    groups: int | str | tuple[Group, ...] = setting(
        3, 'number of groups, a list of groups of classes such as ["0-4", [5, 6, "8-9"]], or "emnist"'
    )

    @field_validator("groups")
    @classmethod
    def _readable(cls, groups: int | str | tuple[Group, ...]) -> int | str | tuple[Group, ...]:
        if isinstance(groups, int):
            if groups < 1:
                raise ValueError("there must be at least one group")
            return groups
        sets = _read(groups)
        if not sets:
            raise ValueError("there must be at least one group")
        seen: set[int] = set()
        for kind in (kind for group in sets for kind in group):
            if kind in seen:
                raise ValueError(f"class {kind} is in two groups")
            seen.add(kind)
        return groups

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> Assignment:
        self.check_size(len(labels), clients)
        classes = self._classes(labels)
        if len(classes) > clients:
            raise DataError(
                f"data.partition: {len(classes)} groups but only {clients} clients; use fewer groups or raise"
                " data.clients"
            )
        members = apportion(clients, np.array([len(found) for found in classes]), least=1)
        group = rng.permutation(np.repeat(np.arange(len(classes)), members))
        own_rows = [rng.permutation(np.flatnonzero(np.isin(labels, found))) for found in classes]
        sizes = np.full(clients, self.samples_per_client or 0, dtype=np.int64)
        if not self.samples_per_client:
            for index, rows in enumerate(own_rows):
                sizes[group == index] = even(len(rows), members[index])
        common = np.floor(sizes * (1 - self.share) + 1e-9).astype(np.int64)
        owner = np.full(len(labels), -1, dtype=np.int64)
        for index, rows in enumerate(own_rows):
            mine = group == index
            wanted = int((sizes - common)[mine].sum())
            if wanted > len(rows) or len(rows) < members[index]:
                remedy = "samples_per_client" if self.samples_per_client else "data.clients"
                raise DataError(
                    f"data.partition: group {index} has {len(rows)} samples but its {members[index]} clients"
                    f" need {max(wanted, members[index])}; lower {remedy}"
                )
            owner[rows[:wanted]] = np.repeat(np.flatnonzero(mine), (sizes - common)[mine])
        left = rng.permutation(np.flatnonzero(owner < 0))[: common.sum()]
        owner[left] = np.repeat(np.arange(clients), common)
        held = np.flatnonzero(owner >= 0)
        lists = np.split(held[np.argsort(owner[held], kind="stable")], np.cumsum(sizes)[:-1])
        return Assignment(lists, facts={"group": group})

    def _classes(self, labels: np.ndarray) -> list[np.ndarray]:
        """Return the classes of each group that occur in the data."""
        there = np.unique(labels)
        if isinstance(self.groups, int):
            if self.groups > len(there):
                raise DataError(
                    f"data.partition: {self.groups} groups but the data has {len(there)} classes; use fewer"
                    " groups"
                )
            return np.split(there, np.cumsum(even(len(there), self.groups))[:-1])
        found = [there[np.isin(there, group)] for group in _read(self.groups)]
        for index, classes in enumerate(found):
            if not len(classes):
                raise DataError(
                    f"data.partition: no class of group {index} occurs in the data; change groups"
                )
        return found


def _read(groups: str | tuple[Group, ...]) -> list[list[int]]:
    """Return groups as lists of classes."""
    if isinstance(groups, str):
        if groups not in _KNOWN:
            raise ValueError(
                f"there are no groups called '{groups}'; write a number, a list of groups, or"
                f' "{next(iter(_KNOWN))}"'
            )
        groups = _KNOWN[groups]
    return [
        [kind for item in (group if isinstance(group, tuple) else (group,)) for kind in _range(item)]
        for group in groups
    ]


def _range(item: int | str) -> range:
    """Read '3-7' or 3."""
    first, _, last = str(item).partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        found = range(0)
    if not 0 < len(found) <= _MOST:
        raise ValueError(f"'{item}' is neither a class nor a range of classes such as \"3-7\"")
    return found
