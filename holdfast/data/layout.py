"""Which Parquet files of a folder belong to which split, in the layouts that datasets have on the Hugging Face Hub.

    train.parquet                               one file for each split
    train-00000-of-00002-a1b2c3.parquet         several files for a split, at the top or in data/
    SUBSET/train-00000-of-00001.parquet         the same for each of several subsets
    SUBSET/train/0000.parquet                   as the Hub converts what was not Parquet

A folder whose files name no split is all train.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from holdfast.core.errors import DataError, suggest

EXPECTED = "train.parquet and test.parquet, or train-00000-of-00002.parquet and so on, at the top or in a folder for each subset"

_NAMES = {"train": "train", "training": "train", "test": "test", "testing": "test"}
_NAMES |= dict.fromkeys(("valid", "validation", "val", "dev"), "validation")
_SHARD = re.compile(r"(?P<split>.+?)-(?P<index>\d+)-of-(?P<total>\d+)(-[0-9a-zA-Z]+)?")

Splits = dict[str, list[PurePosixPath]]


def find_splits(folder: Path, subset: str | None = None) -> dict[str, list[Path]]:
    """The Parquet files of each split, in numeric order; nothing where there are none. Only names are looked at."""
    try:
        found = [path.relative_to(folder).as_posix() for path in folder.rglob("*.parquet") if path.is_file()]
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror or error}") from None
    return {split: [folder / name for name in names] for split, names in arrange(found, subset, str(folder)).items()}


def arrange(names: Iterable[str], subset: str | None, where: str) -> Splits:
    """The same for the names of files, wherever they are: of one subset, the one asked for or the only one."""
    subsets: dict[str, Splits] = {}
    for path in map(PurePosixPath, names):
        if path.suffix == ".parquet" and not any(part.startswith(".") for part in path.parts):
            inside, split = _place(path)
            subsets.setdefault(inside, {}).setdefault(split, []).append(path)
    if not subsets:
        return {}
    splits = subsets[_choose(subsets, subset, where)]
    loose = splits.pop("", [])  # files that name no split count only where none does
    return {split: _whole(paths, split, where) for split, paths in (splits or {"train": loose}).items()}


def _place(path: PurePosixPath) -> tuple[str, str]:
    """Subset and split of a file."""
    above = [part for part in path.parts[:-1] if part != "data"]
    shard = _SHARD.fullmatch(path.stem)
    if path.stem in _NAMES:
        split = _NAMES[path.stem]
    elif shard:
        split = _NAMES.get(shard["split"], shard["split"])
    elif above and above[-1] in _NAMES:
        split = _NAMES[above.pop()]
    else:
        split = ""
    return "/".join(above), split


def _choose(subsets: dict[str, Splits], wanted: str | None, where: str) -> str:
    if wanted in subsets:
        return wanted
    if list(subsets) == [""]:  # no subsets at all: whoever kept only the files of one may have left its name away
        return ""
    if wanted is not None:
        raise DataError(f"{where}: no subset '{wanted}'{suggest(wanted, filter(None, subsets))}")
    for name in ("", "default"):
        if name in subsets:
            return name
    if len(subsets) > 1:
        raise DataError(f"{where}: there are several subsets, set data.options.subset to one of: {', '.join(sorted(subsets))}")
    return next(iter(subsets))


def _whole(paths: list[PurePosixPath], split: str, where: str) -> list[PurePosixPath]:
    """In numeric order; an error where a file is missing, or where the split is there twice."""
    folders = sorted({str(path.parent) for path in paths})
    totals = {int(shard["total"]) if shard else None for shard in (_SHARD.fullmatch(path.stem) for path in paths)}
    if len(folders) > 1 or len(totals) > 1:
        raise DataError(f"{where}: split '{split}' is there more than once ({', '.join(sorted(map(str, paths))[:4])}); keep one")
    ordered = sorted(paths, key=lambda path: ([int(number) for number in re.findall(r"\d+", path.stem)], path.name))
    total = totals.pop()
    if total is not None:
        there = [int(_SHARD.fullmatch(path.stem)["index"]) for path in ordered]  # type: ignore[index]
        if there != list(range(total)):
            missing = sorted(set(range(total)) - set(there))
            if not missing:
                raise DataError(f"{where}: split '{split}' has files with the same number, {ordered[0]} and others; keep one")
            raise DataError(f"{where}: split '{split}' has {len(there)} of {total} files, number {missing[0]} is missing; fetch it again")
    return ordered
