"""Who holds how much of what: one description for the terminal, for pictures, for the page and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.core.errors import in_print
from holdfast.core.files import expand
from holdfast.core.keys import Key
from holdfast.data.federation import DataSettings, Federation, build_federation
from holdfast.data.sources.table import TableSource
from holdfast.experiment.config import Config

PARTS = ("train", "validation", "test", "all")


def federation_of(config: Config) -> Federation:
    """The federation that a run of this config would have."""
    return build_federation(config.data, Key(config.seed).fold("data"))


@dataclass(frozen=True, eq=False)
class Holdings:
    """One part of every client's samples, counted by class."""

    data: DataSettings
    federation: Federation
    part: str
    counts: np.ndarray  # [clients, classes]
    cell: str = ""  # which cell of a sweep this is, and how many differ

    @staticmethod
    def of(config: Config, part: str = "train", cell: str = "") -> Holdings:
        federation = federation_of(config)
        tables = [getattr(federation, name) for name in (PARTS[:-1] if part == "all" else (part,))]
        counts = sum(table.by_class(federation.samples.classes).numpy() for table in tables)
        return Holdings(config.data, federation, part, np.asarray(counts), cell)

    @property
    def names(self) -> list[str]:
        samples = self.federation.samples
        printable = (
            "".join(c if c.isprintable() else "?" for c in name) for name in samples.class_names
        )  # they come from a file
        return list(printable) or list(map(str, range(samples.classes)))

    @property
    def clients(self) -> list[str]:
        """The clients' names, or their numbers where they have none."""
        return list(map(in_print, self.federation.names)) or list(map(str, range(len(self.counts))))

    @property
    def sizes(self) -> np.ndarray:
        """Samples of each client in this part."""
        return self.counts.sum(1)

    @property
    def title(self) -> str:
        return f"{self.federation.samples.name}, {what(self.part)} by client and class"

    def described(self) -> list[tuple[str, str]]:
        """What there is to know of it, line by line."""
        federation, samples, held_out = self.federation, self.federation.samples, self.federation.held_out
        tested = len(samples) - samples.train_rows
        shape = " x ".join(map(str, samples.sample_shape)) or "numbers"
        names = [self.clients[client] for client in held_out]
        late = f", of which {len(held_out)} are held out: {listed(names)}" if held_out else ""
        users = [("users", f"{len(np.unique(samples.user.numpy())):,}")] if samples.user is not None else []
        server = (
            [("server", f"{len(federation.root.row):,} samples of its own")]
            if len(federation.root.row)
            else []
        )
        kinds = (self.counts > 0).sum(1)
        used = columns_of(self.data)
        return [
            (
                "dataset",
                (
                    f"{samples.name}: {samples.train_rows:,} + {tested:,} samples, {samples.classes} classes,"
                    f" {shape}"
                ),
            ),
            *([("columns", listed(list(map(in_print, used)), 40))] if used else []),
            *users,
            (
                "pool",
                {"train": "the train split", "train+test": "train and test split together"}[self.data.pool],
            ),
            ("partition", in_words(self.data.model_dump()["partition"])),
            ("clients", f"{federation.clients:,}{late}"),
            ("samples", ", ".join(f"{name} {len(getattr(federation, name).row):,}" for name in PARTS[:-1])),
            *server,
            ("a client", f"{spread(self.sizes)} {what(self.part)}, {spread(kinds)} classes"),
            ("digest", federation.digest),
            *([("sweep", self.cell)] if self.cell else []),
        ]

    def plain(self) -> dict[str, Any]:
        """As `holdfast data --json` prints it."""
        federation, samples = self.federation, self.federation.samples
        dataset = {
            "name": samples.name,
            "samples": len(samples),
            "train_rows": samples.train_rows,
            "classes": samples.classes,
            "class_names": list(samples.class_names),
            "shape": list(samples.sample_shape),
            "users": None if samples.user is None else len(np.unique(samples.user.numpy())),
        }
        low, middle, high = (float(f(self.sizes)) for f in (np.min, np.median, np.max))
        return {
            "dataset": dataset,
            "pool": self.data.pool,
            "partition": self.data.model_dump()["partition"],
            "digest": federation.digest,
            "clients": federation.clients,
            "held_out": list(federation.held_out),
            "names": list(self.federation.names),
            "part": self.part,
            "samples": {
                name: len(getattr(federation, name).row) for name in (*PARTS[:-1], "root", "global_test")
            },
            "sizes": {"min": int(low), "median": middle, "max": int(high)},
            "counts": self.counts.tolist(),
            "facts": {name: values.tolist() for name, values in federation.facts.items()},
            "cell": self.cell or None,
        }


def columns_of(data: DataSettings) -> list[str]:
    """The columns that a table's samples are made of; empty for other data."""
    source = data.source()
    if not isinstance(source, TableSource):
        return []
    return source.columns_used(expand(data.dir, "data.dir") if data.dir else None)


def what(part: str) -> str:
    return {
        "train": "training samples",
        "validation": "validation samples",
        "test": "test samples",
        "all": "samples",
    }[part]


def spread(values: np.ndarray) -> str:
    """'3 to 9 (median 5)'."""
    low, middle, high = int(values.min()), float(np.median(values)), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,} (median {middle:,g})"


def listed(numbers: Sequence[object], most: int = 12) -> str:
    return ", ".join(map(str, numbers[:most])) + (", ..." if len(numbers) > most else "")


def in_words(chosen: Any) -> str:
    """A part: dirichlet (beta 0.1)."""
    if not isinstance(chosen, dict):
        return str(chosen)
    settings = ", ".join(
        f"{k.replace('_', ' ')} {v}" for k, v in chosen.items() if k != "name" and v is not None
    )
    return f"{chosen.get('name')} ({settings})" if settings else str(chosen.get("name"))
