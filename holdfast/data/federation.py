"""A federation's data: who holds which samples, what they are tested on, what the server holds itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, field_serializer, model_validator

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.keys import Key
from holdfast.core.registry import Part, build
from holdfast.data.samples import Samples
from holdfast.data.split import Split, split_clients
from holdfast.data.table import Padded, Table

__all__ = ["DataSettings", "Federation", "Padded", "Samples", "Split", "Table", "build_federation", "load_samples"]


class DataSettings(BaseModel):
    """The [data] section of a config."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str = Field(default="digits", description="the dataset, a source by name")
    options: dict[str, Any] = Field(default={}, description="settings of the source itself, such as normalise")
    dir: str | None = Field(default=None, description="folder of Parquet datasets; else the environment's HOLDFAST_DATA")
    clients: int = Field(default=20, ge=1, description="how many the samples are dealt to")
    partition: str | dict[str, Any] | InstanceOf[Part] = Field(
        default={"name": "pathological", "classes_per_client": 2},
        description="how samples are dealt: a name, a table with a name, or a part",
    )
    split: Split = Field(default=Split(), description="shares of a client's samples")
    pool: Literal["train+test", "train"] = Field(default="train+test", description="what clients' samples are drawn from")
    root: int = Field(default=0, ge=0, description="samples the server holds itself")
    held_out: int = Field(default=0, ge=0, description="clients that never train and join late")

    @model_validator(mode="after")
    def _sound(self) -> DataSettings:
        if self.held_out >= self.clients:
            raise ValueError(f"held_out is {self.held_out} of {self.clients} clients, nobody is left to train; lower held_out")
        build("partition", self.partition, "data.partition")  # a misspelt setting is an error now, not when the data is there
        _source(self)
        return self

    @field_serializer("partition")
    def _plain(self, partition: Any) -> Any:
        return {"name": partition.name, **partition.settings()} if isinstance(partition, Part) else partition


@dataclass(frozen=True, eq=False)
class Federation:
    """Samples and who holds them. Tables of one pseudo-client are read with take(tensor([0]))."""

    samples: Samples
    train: Table
    validation: Table
    test: Table
    global_test: Table  # the dataset's whole test split; with pool "train+test" clients train on parts of it
    root: Table  # the server's own samples, from the train split, class by class, in no client's hands; may be empty
    digest: str  # names the partition in a manifest
    held_out: tuple[int, ...] = ()  # clients that never train and join late; their tables are filled like the others'

    @property
    def clients(self) -> int:
        return self.train.clients

    def to(self, device: torch.device | str) -> Federation:
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if isinstance(getattr(self, f.name), (Samples, Table))}
        return replace(self, **moved)


def load_samples(settings: DataSettings) -> Samples:
    """The dataset alone; experiments that differ in tables only can share it."""
    samples: Samples = _source(settings).load(Path(settings.dir).expanduser() if settings.dir else None)
    return samples


def _source(settings: DataSettings) -> Any:
    if "name" in settings.options:
        raise ConfigError("data.options.name: the dataset is named by data.name")
    return build("source", {"name": settings.name, **settings.options}, "data.options")


def build_federation(settings: DataSettings, key: Key, samples: Samples | None = None) -> Federation:
    """Load, deal, split. The same settings and key give the same federation."""
    samples = load_samples(settings) if samples is None else samples
    y = samples.y.cpu().numpy()
    root = draw_balanced(y[: samples.train_rows], settings.root, key.fold("root").numpy())
    pool = np.setdiff1d(np.arange(len(y) if settings.pool == "train+test" else samples.train_rows), root)
    lists = _deal(settings, samples, pool, key)
    train, validation, test = split_clients(lists, y, settings.split, key.fold("split"))
    tables = {
        "train": train,
        "validation": validation,
        "test": test,
        "global_test": Table.from_lists([np.arange(samples.train_rows, len(y))], y),
        "root": Table.from_lists([root], y),
    }
    drawn = key.fold("held_out").numpy().permutation(settings.clients)[settings.clients - settings.held_out :]
    held_out = tuple(sorted(int(client) for client in drawn))
    return Federation(samples, **tables, digest=_digest(samples.name, tables, held_out), held_out=held_out)


def draw_balanced(labels: np.ndarray, wanted: int, rng: np.random.Generator) -> np.ndarray:
    """Sorted positions, as many of each class as of any other while a class lasts."""
    if wanted > len(labels):
        raise DataError(f"data.root: {wanted} samples asked for but the train split has {len(labels)}; lower data.root")
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    classes, sizes = np.unique(labels, return_counts=True)
    turn = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # the first of every class, then the second, ...
    place = np.repeat(rng.permutation(len(classes)), sizes)  # which classes are favoured when it does not come out even
    return np.sort(order[np.lexsort((place, turn))[:wanted]])


def _deal(settings: DataSettings, samples: Samples, pool: np.ndarray, key: Key) -> list[np.ndarray]:
    """Rows of each client; whatever the partition, also a plug-in's, no row is dealt twice."""
    partition = build("partition", settings.partition, "data.partition")
    users = None if samples.user is None else samples.user.cpu().numpy()[pool]
    if not len(pool):
        raise DataError("data.root: the server's samples leave none for the clients; lower data.root")
    lists = partition(samples.y.cpu().numpy()[pool], settings.clients, key.fold("partition").numpy(), users)
    if len(lists) != settings.clients:
        raise DataError(f"data.partition: '{partition.name}' dealt to {len(lists)} clients, data.clients is {settings.clients}")
    dealt = np.concatenate(lists).astype(np.int64)
    if len(dealt) and (dealt.min() < 0 or dealt.max() >= len(pool)):
        raise DataError(f"data.partition: '{partition.name}' dealt positions {dealt.min()}..{dealt.max()} of {len(pool)} samples")
    if len(np.unique(dealt)) != len(dealt):
        raise DataError(f"data.partition: '{partition.name}' dealt a sample to two clients")
    return [pool[np.asarray(positions, dtype=np.int64)] for positions in lists]


def _digest(name: str, tables: dict[str, Table], held_out: tuple[int, ...]) -> str:
    sha = hashlib.sha256(f"{name} {held_out}".encode())
    for title, table in tables.items():
        sha.update(f"{title} {table.clients} {len(table.row)}".encode())
        for part in (table.row, table.label, table.start):
            sha.update(part.numpy().astype("<i8").tobytes())
    return sha.hexdigest()
