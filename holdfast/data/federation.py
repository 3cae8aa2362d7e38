"""The data of a federation: which client holds which samples, what clients are tested on, and what the server
holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, field_serializer, model_validator
from torch import Tensor

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.files import expand
from holdfast.core.keys import Key
from holdfast.core.registry import Part, build
from holdfast.data.client_rows import ClientRows, Padded
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

    @model_validator(mode="after")
    def _sound(self) -> DataSettings:
        # a misspelt setting of the partition is an error here, before the data is loaded
        clients = self.known_clients
        if clients is not None and self.held_out >= clients:
            raise ValueError(_all_held_out(self.held_out, clients))
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
    pool = np.setdiff1d(np.arange(len(y) if settings.pool == "train+test" else samples.train_rows), root)
    assignment = _assign(settings, samples, pool, key)
    clients = len(assignment.lists)
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
    )


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

    def rows(lists: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [pool[np.asarray(positions, dtype=np.int64)] for positions in lists]

    return replace(
        assignment,
        lists=rows(assignment.lists),
        tests=None if assignment.tests is None else rows(assignment.tests),
    )


def _problem(assignment: Assignment, clients: int, samples: int) -> str:
    """Describe what is wrong with the result of a partition, which may be a plug-in's; empty when nothing
    is."""
    for lists in (assignment.lists, assignment.tests):
        if lists is None:
            continue
        if len(lists) != clients:
            return f"lists for {len(lists)} clients, but data.clients is {clients}"
        every = np.concatenate(lists).astype(np.int64)
        if len(every) and (every.min() < 0 or every.max() >= samples):
            return f"positions {every.min()}..{every.max()} but there are {samples} samples"
        if any(len(np.unique(positions)) != len(positions) for positions in lists):
            return "the same sample twice for one client"
    held = np.concatenate(assignment.lists).astype(np.int64)
    if not assignment.overlap and len(np.unique(held)) != len(held):
        return "the same sample for two clients"
    if assignment.tests is not None and len(
        np.intersect1d(held, np.concatenate(assignment.tests).astype(np.int64))
    ):
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
