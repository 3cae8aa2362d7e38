"""The data of a federation: which client holds which samples, what clients are tested on, and what the server
holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    field_serializer,
    field_validator,
    model_validator,
)
from torch import Tensor

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.files import expand
from holdfast.core.keys import Key
from holdfast.core.registry import Part, build
from holdfast.data.client_rows import ClientRows, Padded
from holdfast.data.handed.data import section_of
from holdfast.data.partitions.base import Assignment, Partition
from holdfast.data.samples import Samples
from holdfast.data.split import Split, split_clients

__all__ = [
    "DataSettings",
    "Federation",
    "Padded",
    "Samples",
    "Split",
    "ClientRows",
    "build_federation",
    "load_samples",
]

_CLIENTS = 20  # default number of clients


class DataSettings(BaseModel):
    """The [data] section of a config."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str = Field(default="digits", description="name of the dataset (a source)")
    options: dict[str, Any] = Field(default={}, description="settings of the source, such as normalise")
    dir: str | None = Field(
        default=None,
        description="folder of Parquet datasets; default: the environment variable HOLDFAST_DATA",
    )
    clients: int | None = Field(
        default=None,
        ge=1,
        description="number of clients; none: 20, or one per user (by-user)",
    )
    partition: str | dict[str, Any] | InstanceOf[Part] = Field(
        default={"name": "pathological", "classes_per_client": 2},
        description="how samples are assigned to clients: a name, a table with a name, or a part",
    )
    split: Split = Field(
        default=Split(), description="shares of a client's samples for training, validation and testing"
    )
    pool: Literal["train+test", "train"] = Field(
        default="train+test", description="splits of the dataset that clients' samples are drawn from"
    )
    root: int = Field(default=0, ge=0, description="number of samples that the server holds")
    held_out: int = Field(default=0, ge=0, description="number of clients that never train and join late")
    names: tuple[str, ...] = Field(
        default=(), description="names of the clients in tables and pages; none: their numbers"
    )

    @model_validator(mode="before")
    @classmethod
    def _handed(cls, given: Any) -> Any:
        """Accept data that is handed over in Python in place of the settings."""
        return section_of(given)

    @field_validator("names")
    @classmethod
    def _distinct(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if any(not name.strip() for name in names):
            raise ValueError("a client has an empty name")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two clients are called '{twice}'")
        return names

    @model_validator(mode="after")
    def _sound(self) -> DataSettings:
        # a misspelt setting of the partition is an error here, before the data is loaded
        clients = self.known_clients
        if clients is not None and self.held_out >= clients:
            raise ValueError(_all_held_out(self.held_out, clients))
        if self.names and clients is not None and len(self.names) != clients:
            raise ValueError(f"{len(self.names)} names for {clients} clients; give every client one, or none")
        self.source()
        return self

    @property
    def known_clients(self) -> int | None:
        """The number of clients, where it is known before the data is loaded."""
        per_user = self.partitioner().per_user
        return self.clients if self.clients is not None else None if per_user else _CLIENTS

    def partitioner(self) -> Partition:
        partition = build("partition", self.partition, "data.partition")
        if not isinstance(partition, Partition):
            raise ConfigError(f"data.partition: {type(partition).__name__} is not a partition")
        return partition

    def source(self) -> Any:
        if "name" in self.options:
            raise ConfigError("data.options.name: set the name of the dataset in data.name instead")
        return build("source", {"name": self.name, **self.options}, "data.options")

    @field_serializer("clients")
    def _number(self, clients: int | None) -> int | None:
        return self.known_clients

    @field_serializer("partition")
    def _plain(self, partition: Any) -> Any:
        return {"name": partition.name, **partition.settings()} if isinstance(partition, Part) else partition


@dataclass(frozen=True, eq=False)
class Federation:
    """Samples and who holds them. A table of the server has one pseudo-client: read it with
    take(tensor([0]))."""

    samples: Samples
    train: ClientRows
    validation: ClientRows
    test: ClientRows
    # the dataset's whole test split; with pool "train+test", clients train on parts of it
    global_test: ClientRows
    # the server's own samples, balanced over the classes of the train split; may be empty
    root: ClientRows
    digest: str  # identifies the partition in a manifest
    # clients that never train and join late; they have rows in all tables like the others
    held_out: tuple[int, ...] = ()
    # [K] int64 each: what the partition knows about its clients, such as `group`
    facts: Mapping[str, Tensor] = field(default_factory=dict)
    # one per client, where data.names or the users of the data name them
    names: tuple[str, ...] = ()

    @property
    def clients(self) -> int:
        return self.train.clients

    def to(self, device: torch.device | str) -> Federation:
        moved = {
            f.name: getattr(self, f.name).to(device)
            for f in fields(self)
            if isinstance(getattr(self, f.name), (Samples, ClientRows))
        }
        return replace(self, **moved)


def load_samples(settings: DataSettings) -> Samples:
    """Load the dataset alone; experiments that differ only in who holds what can share it."""
    samples: Samples = settings.source().load(expand(settings.dir, "data.dir") if settings.dir else None)
    return samples


def build_federation(settings: DataSettings, key: Key, samples: Samples | None = None) -> Federation:
    """Load the samples, assign them to clients and split them. The same settings and key give the same
    federation."""
    samples = load_samples(settings) if samples is None else samples
    y = samples.y.cpu().numpy()
    root = draw_balanced(y[: samples.train_rows], settings.root, key.fold("root").numpy())
    own_tests = settings.partitioner().own_tests
    both = settings.pool == "train+test" and not own_tests
    pool = np.setdiff1d(np.arange(len(y) if both else samples.train_rows), root)
    assignment = _assign(settings, samples, pool, key)
    clients = len(assignment.lists)
    if settings.names and len(settings.names) != clients:
        raise DataError(f"data.names: {len(settings.names)} names for {clients} clients")
    if own_tests and len(samples):
        assignment = replace(assignment, tests=_own_tests(samples, clients))
        _check_enough(assignment, settings)
    train, validation, test = split_clients(
        assignment.lists, y, settings.split, key.fold("split"), assignment.tests
    )
    tables = {
        "train": train,
        "validation": validation,
        "test": test,
        "global_test": ClientRows.from_lists([np.arange(samples.train_rows, len(y))], y),
        "root": ClientRows.from_lists([root], y),
    }
    if settings.held_out >= clients:
        raise DataError(f"data: {_all_held_out(settings.held_out, clients)}")
    drawn = key.fold("held_out").numpy().permutation(clients)[clients - settings.held_out :]
    held_out = tuple(sorted(int(client) for client in drawn))
    facts = {
        name: torch.from_numpy(np.asarray(values, dtype=np.int64))
        for name, values in assignment.facts.items()
    }
    return Federation(
        samples,
        **tables,
        digest=_digest(samples.name, tables, held_out, facts),
        held_out=held_out,
        facts=facts,
        names=settings.names or _users(samples, settings.partitioner(), facts),
    )


def _users(samples: Samples, partition: Partition, facts: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the users, where each client is one and all have names."""
    if not (partition.per_user and samples.user_names and "user" in facts):
        return ()
    names = tuple(samples.user_names[user] for user in facts["user"].tolist())
    return names if all(name.strip() for name in names) else ()


def _all_held_out(held_out: int, clients: int) -> str:
    return f"held_out is {held_out} of {clients} clients, so no client is left to train; lower held_out"


def draw_balanced(labels: np.ndarray, wanted: int, rng: np.random.Generator) -> np.ndarray:
    """Return sorted positions, the same number of each class as far as a class has enough."""
    if wanted > len(labels):
        raise DataError(
            f"data.root: {wanted} samples requested but the train split has {len(labels)}; lower data.root"
        )
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    classes, sizes = np.unique(labels, return_counts=True)
    # the first of every class, then the second, ...
    turn = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    # which classes get one more when the number does not divide evenly
    place = np.repeat(rng.permutation(len(classes)), sizes)
    return np.sort(order[np.lexsort((place, turn))[:wanted]])


def _assign(settings: DataSettings, samples: Samples, pool: np.ndarray, key: Key) -> Assignment:
    """Return the rows of each client."""
    partition = settings.partitioner()
    if not len(samples):  # declared data: every client brings its own
        return Assignment([pool[:0] for _ in range(settings.known_clients or 1)])
    users = None if samples.user is None else samples.user.cpu().numpy()[pool]
    if not len(pool):
        raise DataError(
            "data.root: the server holds all samples and leaves none for the clients; lower data.root"
        )
    clients = settings.known_clients
    if clients is None:
        # without users, the partition reports the error
        clients = 1 if users is None else len(np.unique(users))
    answer = partition(samples.y.cpu().numpy()[pool], clients, key.fold("partition").numpy(), users)
    assignment = answer if isinstance(answer, Assignment) else Assignment(answer)
    problem = _problem(assignment, clients, len(pool))
    if problem:
        raise DataError(f"data.partition: '{partition.name}' returned {problem}")

    def rows(positions: np.ndarray) -> np.ndarray:
        return pool[np.asarray(positions, dtype=np.int64)]

    tests = assignment.tests
    return replace(
        assignment,
        lists=[rows(positions) for positions in assignment.lists],
        tests=None if tests is None else [None if own is None else rows(own) for own in tests],
    )


def _own_tests(samples: Samples, clients: int) -> list[np.ndarray | None]:
    """Return the test rows of every client that was given a test set."""
    assert samples.user is not None
    owner = samples.user.numpy()[samples.train_rows :]
    rows = [samples.train_rows + np.flatnonzero(owner == client) for client in range(clients)]
    return [one if len(one) else None for one in rows]


def _check_enough(assignment: Assignment, settings: DataSettings) -> None:
    """Refuse a client with too few samples for all parts of its split."""
    for client, rows in enumerate(assignment.lists):
        tested = assignment.tests is not None and assignment.tests[client] is not None
        parts = {"training": 1.0, "validation": settings.split.validation}
        parts |= {} if tested else {"testing": settings.split.test}
        needed = [name for name, share in parts.items() if share > 0]
        if len(rows) < len(needed):
            who = f"'{settings.names[client]}'" if settings.names else str(client)
            raise DataError(
                f"data: client {who} has {len(rows)} sample{'s' * (len(rows) != 1)}, but data.split needs"
                f" one each"
                f" for {' and '.join(needed)}; give it more, or leave it out"
            )


def _problem(assignment: Assignment, clients: int, samples: int) -> str:
    """Describe what is wrong with the result of a partition, which may be a plug-in's; empty when nothing
    is."""
    for lists in (assignment.lists, assignment.tests):
        if lists is None:
            continue
        held = [positions for positions in lists if positions is not None]
        if len(lists) != clients:
            return f"lists for {len(lists)} clients, but data.clients is {clients}"
        every = np.concatenate([np.zeros(0), *held]).astype(np.int64)
        if len(every) and (every.min() < 0 or every.max() >= samples):
            return f"positions {every.min()}..{every.max()} but there are {samples} samples"
        if any(len(np.unique(positions)) != len(positions) for positions in held):
            return "the same sample twice for one client"
    trained = np.concatenate(assignment.lists).astype(np.int64)
    if not assignment.overlap and len(np.unique(trained)) != len(trained):
        return "the same sample for two clients"
    tested = [own for own in assignment.tests or () if own is not None]
    if tested and len(np.intersect1d(trained, np.concatenate(tested).astype(np.int64))):
        return "a test sample that a client trains on"
    odd = [name for name, values in assignment.facts.items() if len(values) != clients]
    return f"a fact '{odd[0]}' that does not have one number per client" if odd else ""


def _digest(
    name: str, tables: dict[str, ClientRows], held_out: tuple[int, ...], facts: Mapping[str, Tensor]
) -> str:
    sha = hashlib.sha256(f"{name} {held_out}".encode())
    for title, table in tables.items():
        sha.update(f"{title} {table.clients} {len(table.row)}".encode())
        for part in (table.row, table.label, table.start):
            sha.update(part.numpy().astype("<i8").tobytes())
    for title, values in facts.items():
        sha.update(title.encode() + values.numpy().astype("<i8").tobytes())
    return sha.hexdigest()
