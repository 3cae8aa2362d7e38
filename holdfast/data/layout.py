"""Which Parquet files of a folder belong to which split, in the layouts that datasets have on the Hugging
Face Hub.

    train.parquet                               one file for each split
    train-00000-of-00002-a1b2c3.parquet         several files for a split, at the top or in data/
    SUBSET/train-00000-of-00001.parquet         the same for each of several subsets
    SUBSET/train/0000.parquet                   as the Hub converts what was not Parquet
    my_train_1.parquet, Test-0.parquet          a split's name as a word of the file's name, or of a folder's
                                                above it

A folder whose files name no split is all train. Next to files that name one, files that name none, or two at
once, are left alone.




"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from holdfast.core.errors import DataError, suggest

EXPECTED = (
    "train.parquet and test.parquet, or train-00000-of-00002.parquet and so on, at the top or in a folder for"
    " each subset"
)

_NAMES = dict.fromkeys(("train", "training"), "train")  # as the Hub's own library understands them
_NAMES |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
_NAMES |= dict.fromkeys(("valid", "validation", "val", "dev"), "validation")
_BETWEEN = re.compile(r"[-._ 0-9]+")  # what separates words of a name
_SHARD = re.compile(r"(?P<split>.+?)[-_](?P<index>\d{1,9})[-_]of[-_](?P<total>\d{1,9})([-.]\w+)*")

_DEEPEST = 50  # folders within each other that are looked into

Splits = dict[str, list[PurePosixPath]]


def find_splits(folder: Path, subset: str | None = None) -> dict[str, list[Path]]:
    """The Parquet files of each split, in numeric order; nothing where there are none. Only names are looked
    at."""
    try:
        found = [path.relative_to(folder).as_posix() for path in _below(folder)]
    except OSError as error:
        raise DataError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from None
    return {
        split: [folder / name for name in names]
        for split, names in arrange(found, subset, str(folder)).items()
    }


def _below(folder: Path, inside: tuple[str, ...] = ()) -> Iterator[Path]:
    """Links are followed, but not back into a folder that we are in. One that leads nowhere counts too:
    whoever reads it says so."""
    real = os.path.realpath(folder)
    if real in inside or len(inside) > _DEEPEST:
        return
    for name in sorted(os.listdir(folder)):
        if name.startswith("."):
            continue
        if os.path.isdir(folder / name):
            yield from _below(folder / name, (*inside, real))
        elif name.endswith(".parquet"):
            yield folder / name


def arrange(names: Iterable[str], subset: str | None, where: str) -> Splits:
    """The same for the names of files, wherever they are: of one subset, the one asked for or the only
    one."""
    subsets: dict[str, Splits] = {}
    for path in map(PurePosixPath, names):
        if path.suffix == ".parquet" and not any(part.startswith(".") for part in path.parts):
            inside, split = _place(path)
            subsets.setdefault(inside, {}).setdefault(split, []).append(path)
    if not subsets:
        return {}
    splits = subsets[_choose(subsets, subset, where)]
    loose = splits.pop("", [])  # files that name no split count only where none does
    splits = splits or {"train": loose}
    if "train" not in splits:  # mine_train-00000-of-00001.parquet
        splits = _by_word(splits)
    return {split: _whole(paths, split, where) for split, paths in splits.items()}


def choose_test(splits: dict[str, Any], wanted: str | None, where: str) -> str | None:
    """The split to test on: the one asked for, or else test, or validation, or the only one like them. None:
    a share of train."""
    if wanted == "none":
        return None
    if wanted is None:
        alike = sorted(name for name in splits if _word(name) in ("test", "validation"))
        usual = [name for name in ("test", "validation") if name in alike] or alike
        if usual is alike and len(alike) > 1:
            raise DataError(
                f"{where}: which split is for testing? Set data.options.test_split to one of:"
                f" {', '.join(alike)}, none"
            )
        return usual[0] if usual else None
    name = wanted if wanted in splits else _NAMES.get(wanted.lower(), wanted)
    if name == "train":
        raise DataError(
            "data.options.test_split: 'train' is what is trained on; none would set a share of it aside"
        )
    if name not in splits:
        raise DataError(
            f"{where}: no split '{wanted}' for data.options.test_split{suggest(wanted, [*splits, 'none'])}"
        )
    return name


def _place(path: PurePosixPath) -> tuple[str, str]:
    """Subset and split of a file: its own name says the split, or else that of the nearest folder that
    does."""
    above = [part for part in path.parts[:-1] if part != "data"]
    shard = _SHARD.fullmatch(path.stem)
    split = _official(shard["split"]) if shard else _word(path.stem)
    for at in reversed(range(len(above))):
        if split:
            break
        split = _official(above[at]) if path.stem.isdigit() else _word(above[at])
        if split:
            del above[at]
    return "/".join(above), split or (shard["split"] if shard else "")


def _word(name: str) -> str:
    """The split that is a word of a name; '' where none is. A name with two of them is a split of its own."""
    found = {_NAMES[word] for word in _BETWEEN.split(name.lower()) if word in _NAMES}
    return name if len(found) > 1 else found.pop() if found else ""


def _official(name: str) -> str:
    """The same where the Hub itself names files by splits, so that validation_matched is another split than
    validation, and eval than test. It may write something before a hyphen (partial-train)."""
    last = name.lower().rpartition("-")[2]
    return _word(name) and (name if last.startswith("eval") else _NAMES.get(last, name))


def _by_word(splits: Splits) -> Splits:
    out: Splits = {}
    for name, paths in splits.items():
        out.setdefault(_word(name) or name, []).extend(paths)
    return out


def _choose(subsets: dict[str, Splits], wanted: str | None, where: str) -> str:
    if wanted in subsets:
        return wanted
    if list(subsets) == [
        ""
    ]:  # no subsets at all: whoever kept only the files of one may have left its name away
        return ""
    if wanted is not None:
        raise DataError(f"{where}: no subset '{wanted}'{suggest(wanted, filter(None, subsets))}")
    naming = [name for name, splits in subsets.items() if set(splits) != {""}] or list(
        subsets
    )  # not a stray file beside them
    for name in ("", "default"):
        if name in naming:
            return name
    if len(naming) > 1:
        raise DataError(
            f"{where}: there are several subsets, set data.options.subset to one of:"
            f" {', '.join(sorted(naming))}"
        )
    return naming[0]


def _whole(paths: list[PurePosixPath], split: str, where: str) -> list[PurePosixPath]:
    """In numeric order; an error where a file is missing, or where the split is there twice."""
    folders = sorted({str(path.parent) for path in paths})
    totals = {
        int(shard["total"]) if shard else None for shard in (_SHARD.fullmatch(path.stem) for path in paths)
    }
    if len(folders) > 1 or len(totals) > 1:
        raise DataError(
            f"{where}: split '{split}' is there more than once ({', '.join(sorted(map(str, paths))[:4])});"
            " keep one"
        )
    ordered = sorted(
        paths, key=lambda path: ([int(number) for number in re.findall(r"\d{1,99}", path.stem)], path.name)
    )
    total = totals.pop()
    if total is not None:
        there = [int(_SHARD.fullmatch(path.stem)["index"]) for path in ordered]  # type: ignore[index]
        if there != list(range(len(there))) or len(there) != total:
            missing = next(
                number for number in range(len(there) + 1) if number not in there
            )  # a name may claim any total
            if missing >= total:
                raise DataError(
                    f"{where}: split '{split}' has files with the same number, {ordered[0]} and others;"
                    " keep one"
                )
            raise DataError(
                f"{where}: split '{split}' has {len(there)} of {total} files, number {missing} is missing;"
                " fetch it again"
            )
    return ordered
