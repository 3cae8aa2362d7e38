"""Find a dataset's files: first in data.dir, then in HOLDFAST_DATA, then in the local cache, then on the
Hub."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.core.errors import DataError
from holdfast.core.files import expand
from holdfast.data.cache import cache_folder
from holdfast.data.hub import Repository, Unreachable, fetch
from holdfast.data.layout import EXPECTED, find_splits

ENVIRONMENT = "HOLDFAST_DATA"

Files = dict[str, list[Path]]


def find_files(
    names: Sequence[str], dir: Path | None, repository: Repository, instead: str | None = None
) -> Files:
    """Return the Parquet files of each split, from the first place that has them. `names` are the names that
    a folder may have, the usual one first; a name that is a path is only looked up at that path. A folder may
    hold the file `instead` in place of Parquet files; then that file is returned, under its name."""
    expected = EXPECTED + (f", or with {instead}" if instead else "")
    own = expand(names[0], "data.options.folder")
    if own.is_absolute() or names[0].startswith("."):
        return _in_folder(own, repository.subset, instead) or _nowhere(own, expected)
    tried = []
    for title, place in _places(dir):
        if place is None:
            tried.append(f"{title} (not set)")
            continue
        _check_there(title, place)
        for folder in _spelt(place, names):
            files = _in_folder(folder, repository.subset, instead)
            if files:
                return files
        tried.append(f"{title} ({place}: {_why_not(place, names)})")
    try:
        return find_splits(fetch(repository, _downloads()), repository.subset)
    except Unreachable as error:
        tried.append(f"the Hub ({error})")
    usual = names[0].replace("-", "_")
    hint = "set data.dir (--data-dir) or HOLDFAST_DATA to the folder that holds"
    raise DataError(
        f"data '{names[0]}' not found: searched {', '.join(tried)}; {hint} {usual}/ with {expected}"
    )


def _places(dir: Path | None) -> Iterator[tuple[str, Path | None]]:
    from_environment = os.environ.get(ENVIRONMENT)
    yield "data.dir", dir
    yield ENVIRONMENT, expand(from_environment, ENVIRONMENT) if from_environment else None
    yield "the cache", _downloads()


def _check_there(title: str, place: Path) -> None:
    """Report a missing folder that was asked for. A run that is resumed on another machine may have the
    data.dir of the first machine; there the samples are compared with those it began with."""
    if os.path.isdir(place):
        return
    if title == ENVIRONMENT:
        raise DataError(f"{title}: there is no folder {place}; correct it or unset it")
    if title == "data.dir":
        warnings.warn(
            f"data.dir: there is no folder {place}; searching the other places", UserWarning, stacklevel=3
        )


def check_folder(dir: str | None) -> None:
    """Refuse a data.dir that is not there, for a run that begins."""
    if dir and not expand(dir, "data.dir").is_dir():
        raise DataError(f"data.dir: there is no folder {dir}; correct it or leave it out")


def _downloads() -> Path | None:
    cache = cache_folder()
    return cache and cache / "datasets"


def _spelt(place: Path, names: Sequence[str]) -> list[Path]:
    """Return the folders that may hold the dataset; `place` itself too, if it has the name of the dataset."""
    spellings = list(
        dict.fromkeys(
            spelling for name in names for spelling in (name, name.replace("-", "_"), name.replace("_", "-"))
        )
    )
    return [place / spelling for spelling in spellings] + ([place] if place.name in spellings else [])


def _in_folder(folder: Path, subset: str | None, instead: str | None) -> Files:
    files = find_splits(folder, subset) if os.path.isdir(folder) else {}
    if "train" in files:
        return files
    return {instead: [folder / instead]} if instead and os.path.isfile(folder / instead) else {}


def _why_not(place: Path, names: Sequence[str]) -> str:
    if not os.path.isdir(place):
        return "no such folder"
    folder = next((folder for folder in _spelt(place, names) if os.path.isdir(folder)), None)
    return f"no train split in {folder.name}/" if folder else f"no folder {names[0].replace('-', '_')}/"


def _nowhere(folder: Path, expected: str) -> Files:
    there = "the folder has no train split" if os.path.isdir(folder) else "there is no such folder"
    raise DataError(f"data.options.folder {folder}: {there}; expected {expected}")
