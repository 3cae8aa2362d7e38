"""A federation's data: who holds which samples, what they are tested on, what the server holds itself."""

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

_CLIENTS = 20  # where nothing else is said


class DataSettings(BaseModel):
    """The [data] section of a config."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str = Field(default="digits", description="the dataset, a source by name")
    options: dict[str, Any] = Field(
        default={}, description="settings of the source itself, such as normalise"
    )
    dir: str | None = Field(
        default=None, description="folder of Parquet datasets; else the environment's HOLDFAST_DATA"
    )
    clients: int | None = Field(
        default=None,
        ge=1,
        description="how many the samples are dealt to; none: 20, or one per user (by-user)",
    )
    partition: str | dict[str, Any] | InstanceOf[Part] = Field(
        default={"name": "pathological", "classes_per_client": 2},
        description="how samples are dealt: a name, a table with a name, or a part",
    )
    split: Split = Field(default=Split(), description="shares of a client's samples")
    pool: Literal["train+test", "train"] = Field(
        default="train+test", description="what clients' samples are drawn from"
    )
    root: int = Field(default=0, ge=0, description="samples the server holds itself")
    held_out: int = Field(default=0, ge=0, description="clients that never train and join late")

    @model_validator(mode="after")
    def _sound(self) -> DataSettings:
        clients = (
            self.known_clients
        )  # a misspelt setting of the partition is an error now, not when the data is there
        if clients is not None and self.held_out >= clients:
            raise ValueError(_all_held_out(self.held_out, clients))
        self.source()
        return self

    @property
    def known_clients(self) -> int | None:
        """How many there are, where it can be said before the data is there."""
        per_user = self.partitioner().per_user
        return self.clients if self.clients is not None else None if per_user else _CLIENTS

    def partitioner(self) -> Partition:
        partition = build("partition", self.partition, "data.partition")
        if not isinstance(partition, Partition):
            raise ConfigError(f"data.partition: {type(partition).__name__} is not a partition")
        return partition

    def source(self) -> Any:
        if "name" in self.options:
            raise ConfigError("data.options.name: the dataset is named by data.name")
        return build("source", {"name": self.name, **self.options}, "data.options")

    @field_serializer("clients")
    def _number(self, clients: int | None) -> int | None:
        return self.known_clients

    @field_serializer("partition")
    def _plain(self, partition: Any) -> Any:
        return {"name": partition.name, **partition.settings()} if isinstance(partition, Part) else partition


@dataclass(frozen=True, eq=False)
class Federation:
    """Samples and who holds them. Tables of one pseudo-client are read with take(tensor([0]))."""

    samples: Samples
    train: ClientRows
    validation: ClientRows
    test: ClientRows
    global_test: (
        ClientRows  # the dataset's whole test split; with pool "train+test" clients train on parts of it
    )
    # the server's own samples, from the train split, class by class, in no client's hands; may be empty
    root: ClientRows
    digest: str  # names the partition in a manifest
    held_out: tuple[
        int, ...
    ] = ()  # clients that never train and join late; their tables are filled like the others'
    facts: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # [K] int64 each: what the partition knows of its clients, such as `group`

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
    """The dataset alone; experiments that differ in tables only can share it."""
    samples: Samples = settings.source().load(expand(settings.dir, "data.dir") if settings.dir else None)
    return samples


def build_federation(settings: DataSettings, key: Key, samples: Samples | None = None) -> Federation:
    """Load, deal, split. The same settings and key give the same federation."""
    samples = load_samples(settings) if samples is None else samples
    y = samples.y.cpu().numpy()
    root = draw_balanced(y[: samples.train_rows], settings.root, key.fold("root").numpy())
    pool = np.setdiff1d(np.arange(len(y) if settings.pool == "train+test" else samples.train_rows), root)
    dealt = _deal(settings, samples, pool, key)
    clients = len(dealt.lists)
    train, validation, test = split_clients(dealt.lists, y, settings.split, key.fold("split"), dealt.tests)
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
        name: torch.from_numpy(np.asarray(values, dtype=np.int64)) for name, values in dealt.facts.items()
    }
    return Federation(
        samples,
        **tables,
        digest=_digest(samples.name, tables, held_out, facts),
        held_out=held_out,
        facts=facts,
    )


def _all_held_out(held_out: int, clients: int) -> str:
    return f"held_out is {held_out} of {clients} clients, nobody is left to train; lower held_out"


def draw_balanced(labels: np.ndarray, wanted: int, rng: np.random.Generator) -> np.ndarray:
    """Sorted positions, as many of each class as of any other while a class lasts."""
    if wanted > len(labels):
        raise DataError(
            f"data.root: {wanted} samples asked for but the train split has {len(labels)}; lower data.root"
        )
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    classes, sizes = np.unique(labels, return_counts=True)
    turn = np.arange(len(order)) - np.repeat(
        np.cumsum(sizes) - sizes, sizes
    )  # the first of every class, then the second, ...
    place = np.repeat(
        rng.permutation(len(classes)), sizes
    )  # which classes are favoured when it does not come out even
    return np.sort(order[np.lexsort((place, turn))[:wanted]])


def _deal(settings: DataSettings, samples: Samples, pool: np.ndarray, key: Key) -> Assignment:
    """Rows of each client."""
    partition = settings.partitioner()
    if not len(samples):  # declared only: every client brings its own
        return Assignment([pool[:0] for _ in range(settings.known_clients or 1)])
    users = None if samples.user is None else samples.user.cpu().numpy()[pool]
    if not len(pool):
        raise DataError("data.root: the server's samples leave none for the clients; lower data.root")
    clients = settings.known_clients
    if clients is None:
        clients = (
            1 if users is None else len(np.unique(users))
        )  # without users, the partition says what is wrong
    answer = partition(samples.y.cpu().numpy()[pool], clients, key.fold("partition").numpy(), users)
    dealt = answer if isinstance(answer, Assignment) else Assignment(answer)
    problem = _problem(dealt, clients, len(pool))
    if problem:
        raise DataError(f"data.partition: '{partition.name}' dealt {problem}")

    def rows(lists: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [pool[np.asarray(positions, dtype=np.int64)] for positions in lists]

    return replace(dealt, lists=rows(dealt.lists), tests=None if dealt.tests is None else rows(dealt.tests))


def _problem(dealt: Assignment, clients: int, samples: int) -> str:
    """What is wrong with what a partition, maybe a plug-in's, dealt; empty when nothing is."""
    for lists in (dealt.lists, dealt.tests):
        if lists is None:
            continue
        if len(lists) != clients:
            return f"to {len(lists)} clients, data.clients is {clients}"
        every = np.concatenate(lists).astype(np.int64)
        if len(every) and (every.min() < 0 or every.max() >= samples):
            return f"positions {every.min()}..{every.max()} of {samples} samples"
        if any(len(np.unique(positions)) != len(positions) for positions in lists):
            return "a sample to a client twice"
    held = np.concatenate(dealt.lists).astype(np.int64)
    if not dealt.overlap and len(np.unique(held)) != len(held):
        return "a sample to two clients"
    if dealt.tests is not None and len(np.intersect1d(held, np.concatenate(dealt.tests).astype(np.int64))):
        return "a sample for testing that a client trains on"
    odd = [name for name, values in dealt.facts.items() if len(values) != clients]
    return f"a fact '{odd[0]}' that is not one number for each client" if odd else ""


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
