"""Where a dataset's files are: data.dir first, then the environment's HOLDFAST_DATA, then the local cache, then the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.core.errors import DataError
from holdfast.data.cache import cache_folder
from holdfast.data.hub import Repository, Unreachable, fetch
from holdfast.data.layout import EXPECTED, find_splits

ENVIRONMENT = "HOLDFAST_DATA"

Files = dict[str, list[Path]]


def find_files(names: Sequence[str], dir: Path | None, repository: Repository) -> Files:
    """The Parquet files of each split, from the first place that has them. The names are those a folder may have, the usual one first;
    a name that is a path is looked at where it points to, and nowhere else."""
    own = Path(names[0]).expanduser()
    if own.is_absolute() or names[0].startswith("."):
        return _in_folder(own, repository.subset) or _nowhere(own)
    tried = []
    for title, place in _places(dir):
        if place is None:
            tried.append(f"{title} (not set)")
            continue
        for folder in _spelt(place, names):
            files = _in_folder(folder, repository.subset)
            if files:
                return files
        tried.append(f"{title} ({place}: {_why_not(place, names)})")
    try:
        return find_splits(fetch(repository, _downloads()), repository.subset)
    except Unreachable as error:
        tried.append(f"the Hub ({error})")
    usual = names[0].replace("-", "_")
    hint = "point data.dir (--data-dir) or HOLDFAST_DATA at the folder that holds"
    raise DataError(f"data '{names[0]}' not found: looked in {', '.join(tried)}; {hint} {usual}/ with {EXPECTED}")


def find_file(names: Sequence[str], dir: Path | None, file: str) -> Path | None:
    """A dataset's file that is not Parquet, where its folder has it."""
    own = Path(names[0]).expanduser()
    pointed_at = own.is_absolute() or names[0].startswith(".")
    folders = [own] if pointed_at else [folder for _, place in _places(dir) if place for folder in _spelt(place, names)]
    return next((folder / file for folder in folders if (folder / file).is_file()), None)


def _places(dir: Path | None) -> Iterator[tuple[str, Path | None]]:
    from_environment = os.environ.get(ENVIRONMENT)
    yield "data.dir", dir
    yield ENVIRONMENT, Path(from_environment).expanduser() if from_environment else None
    yield "the cache", _downloads()


def _downloads() -> Path | None:
    cache = cache_folder()
    return cache and cache / "datasets"


def _spelt(place: Path, names: Sequence[str]) -> list[Path]:
    """The folders it may be in; the place itself where it was pointed at the dataset instead of at what holds it."""
    spellings = list(dict.fromkeys(spelling for name in names for spelling in (name, name.replace("-", "_"), name.replace("_", "-"))))
    return [place / spelling for spelling in spellings] + ([place] if place.name in spellings else [])


def _in_folder(folder: Path, subset: str | None) -> Files:
    files = find_splits(folder, subset) if folder.is_dir() else {}
    return files if "train" in files else {}


def _why_not(place: Path, names: Sequence[str]) -> str:
    if not place.is_dir():
        return "no such folder"
    folder = next((folder for folder in _spelt(place, names) if folder.is_dir()), None)
    return f"no train split in {folder.name}/" if folder else f"no folder {names[0].replace('-', '_')}/"


def _nowhere(folder: Path) -> Files:
    there = "it has no train split" if folder.is_dir() else "there is no such folder"
    raise DataError(f"data.options.folder {folder}: {there}; expected {EXPECTED}")
