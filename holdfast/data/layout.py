"""Find which Parquet files of a folder belong to which split, in the layouts of datasets on the Hugging Face
Hub.

    train.parquet                               one file for each split
    train-00000-of-00002-a1b2c3.parquet         several files for a split, at the top or in data/
    SUBSET/train-00000-of-00001.parquet         the same for each of several subsets
    SUBSET/train/0000.parquet                   as the Hub converts other formats to Parquet
    my_train_1.parquet, Test-0.parquet          a split's name as a word of the file's name, or of a folder's
                                                above it

If no file of a folder names a split, all are train. Beside files that name one, files that name none, or two
at once, are ignored.
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

_NAMES = dict.fromkeys(("train", "training"), "train")  # the names that the Hub's own library knows
_NAMES |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
_NAMES |= dict.fromkeys(("valid", "validation", "val", "dev"), "validation")
_BETWEEN = re.compile(r"[-._ 0-9]+")  # separates the words of a name
_SHARD = re.compile(r"(?P<split>.+?)[-_](?P<index>\d{1,9})[-_]of[-_](?P<total>\d{1,9})([-.]\w+)*")

_DEEPEST = 50  # levels of folders that are searched

Splits = dict[str, list[PurePosixPath]]


def find_splits(folder: Path, subset: str | None = None) -> dict[str, list[Path]]:
    """Return the Parquet files of each split, in numeric order; empty where there are none. Only names are
    read."""
    try:
        found = [path.relative_to(folder).as_posix() for path in _below(folder)]
    except OSError as error:
        raise DataError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from None
    return {
        split: [folder / name for name in names]
        for split, names in arrange(found, subset, str(folder)).items()
    }


def _below(folder: Path, inside: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the Parquet files below a folder. Links are followed, but not back into a folder that contains
    them. A broken link counts too: reading it reports the error."""
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
    """Return the splits of one subset, the given one or the only one, from the names of files."""
    subsets: dict[str, Splits] = {}
    for path in map(PurePosixPath, names):
        if path.suffix == ".parquet" and not any(part.startswith(".") for part in path.parts):
            inside, split = _place(path)
            subsets.setdefault(inside, {}).setdefault(split, []).append(path)
    if not subsets:
        return {}
    splits = subsets[_choose(subsets, subset, where)]
    loose = splits.pop("", [])  # files that name no split count only where no file names one
    splits = splits or {"train": loose}
    if "train" not in splits:  # for example mine_train-00000-of-00001.parquet
        splits = _by_word(splits)
    return {split: _whole(paths, split, where) for split, paths in splits.items()}


def choose_test(splits: dict[str, Any], wanted: str | None, where: str) -> str | None:
    """Return the split to test on: the given one, or test, or validation, or the only similar one. None: a
    share of train."""
    if wanted == "none":
        return None
    if wanted is None:
        alike = sorted(name for name in splits if _word(name) in ("test", "validation"))
        usual = [name for name in ("test", "validation") if name in alike] or alike
        if usual is alike and len(alike) > 1:
            raise DataError(
                f"{where}: several splits could be for testing; set data.options.test_split to one of:"
                f" {', '.join(alike)}, none"
            )
        return usual[0] if usual else None
    name = wanted if wanted in splits else _NAMES.get(wanted.lower(), wanted)
    if name == "train":
        raise DataError(
            "data.options.test_split: 'train' is the split to train on; set it to none to set aside a"
            " share of train"
        )
    if name not in splits:
        raise DataError(
            f"{where}: there is no split '{wanted}' for"
            f" data.options.test_split{suggest(wanted, [*splits, 'none'])}"
        )
    return name


def _place(path: PurePosixPath) -> tuple[str, str]:
    """Return subset and split of a file: its own name says the split, or else that of the nearest folder that
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
    """Return the split that is a word of a name; '' if there is none. A name with two of them is a split of
    its own."""
    found = {_NAMES[word] for word in _BETWEEN.split(name.lower()) if word in _NAMES}
    return name if len(found) > 1 else found.pop() if found else ""


def _official(name: str) -> str:
    """Return the split of a name that the Hub itself gave, so that validation_matched differs from
    validation, and eval from test. A name may have a prefix with a hyphen (partial-train)."""
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
    # no subsets at all: the files of one subset may have been copied without its folder
    if list(subsets) == [""]:
        return ""
    if wanted is not None:
        raise DataError(f"{where}: there is no subset '{wanted}'{suggest(wanted, filter(None, subsets))}")
    # ignore a stray file beside them
    naming = [name for name, splits in subsets.items() if set(splits) != {""}] or list(subsets)
    for name in ("", "default"):
        if name in naming:
            return name
    if len(naming) > 1:
        raise DataError(
            f"{where}: there are several subsets; set data.options.subset to one of:"
            f" {', '.join(sorted(naming))}"
        )
    return naming[0]


def _whole(paths: list[PurePosixPath], split: str, where: str) -> list[PurePosixPath]:
    """Return the paths in numeric order; an error where a file is missing, or where the split exists
    twice."""
    folders = sorted({str(path.parent) for path in paths})
    totals = {
        int(shard["total"]) if shard else None for shard in (_SHARD.fullmatch(path.stem) for path in paths)
    }
    if len(folders) > 1 or len(totals) > 1:
        raise DataError(
            f"{where}: split '{split}' exists more than once ({', '.join(sorted(map(str, paths))[:4])});"
            " keep one"
        )
    ordered = sorted(
        paths, key=lambda path: ([int(number) for number in re.findall(r"\d{1,99}", path.stem)], path.name)
    )
    total = totals.pop()
    if total is not None:
        there = [int(_SHARD.fullmatch(path.stem)["index"]) for path in ordered]  # type: ignore[index]
        if there != list(range(len(there))) or len(there) != total:
            # a name may claim any total
            missing = next(number for number in range(len(there) + 1) if number not in there)
            if missing >= total:
                raise DataError(
                    f"{where}: split '{split}' has several files with the same number, such as"
                    f" {ordered[0]}; keep one"
                )
            raise DataError(
                f"{where}: split '{split}' has {len(there)} of {total} files, number {missing} is"
                " missing; download it again"
            )
    return ordered
