"""The Hugging Face Hub: a dataset's Parquet files, fetched once into the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class Unreachable(Exception):
    """Why the Hub does not serve, in a few words."""


@dataclass(frozen=True)
class Repository:
    """A dataset on the Hub; without an id there is none."""

    id: str | None
    subset: str | None = None
    revision: str | None = None


def fetch(repository: Repository, downloads: Path | None) -> Path:
    """The folder that the Parquet files of the train and test splits lie in; fetched unless that is done."""
    raise Unreachable("no data.options.repo" if repository.id is None else "not yet")
