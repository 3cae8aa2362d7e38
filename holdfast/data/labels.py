"""Read labels from a column: class numbers as they are; words and booleans as the index in their sorted
names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.core.errors import DataError, suggest

if TYPE_CHECKING:
    import pyarrow as pa

    from holdfast.data.parquet import ParquetRows

_UNLABELLED = "set data.options.test_split to a split with labels, or to none"

Labels = tuple[np.ndarray, int, tuple[str, ...]]


def read_labels(
    rows: ParquetRows | Sequence[ParquetRows],
    column: str,
    classes: int | None = None,
    names: Sequence[str] = (),
) -> Labels:
    """Return int64 labels 0..classes-1, the number of classes, and their names where they are known.

    Pass all splits at once: the labels are returned end to end, and the classes are collected over all
    splits, so that a class that occurs only in the test split counts too. `classes` and `names` are those of
    a known dataset; otherwise they are read from the files.
    """
    splits, columns = _columns(rows, column)
    if _is_number(columns[0].type):
        return _numbers(splits, column, columns, classes, tuple(names))
    return _words(splits, column, columns, classes, tuple(names))


def read_users(rows: ParquetRows | Sequence[ParquetRows], column: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return int64 users: the column's numbers or words, renumbered 0, 1, 2 and so on in ascending order; and
    the words, if they are words."""
    splits, columns = _columns(rows, column)
    if not _is_number(columns[0].type):
        users, _, names = _words(splits, column, columns, None, ())
        return users, names
    # splits may store them in different types: they are compared as Python integers, which lose nothing
    distinct = []
    for split, one in zip(splits, columns, strict=True):
        values = np.asarray(one.to_numpy())
        wrong = ~_is_whole(values)
        if wrong.any():
            row = int(wrong.argmax())
            raise DataError(
                f"{split.place(row)} has {values[row]!s} in '{column}', but users must be whole numbers"
                " or words"
            )
        # its own return_inverse would take several times the memory
        found = np.unique(values)
        distinct.append(([int(value) for value in found], np.searchsorted(found, values)))
    number = {
        user: place for place, user in enumerate(sorted(set().union(*(found for found, _ in distinct))))
    }
    users = np.concatenate(
        [np.array([number[user] for user in found], dtype=np.int64)[where] for found, where in distinct]
    )
    return users, ()


def _columns(
    rows: ParquetRows | Sequence[ParquetRows], column: str
) -> tuple[list[ParquetRows], list[pa.ChunkedArray]]:
    """Return the column of each split: numbers in all of them, or words in all of them."""
    splits = list(rows) if isinstance(rows, Sequence) else [rows]
    for split in splits:
        split.need(column)
    columns = [_sound(split, column) for split in splits]
    for split, one in zip(splits, columns, strict=True):
        if _is_number(one.type) != _is_number(columns[0].type):
            first = f"{columns[0].type} in {splits[0].paths[0].name}"
            raise DataError(
                f"{split.paths[0]}: column '{column}' holds {one.type}, but {first}; store it as the"
                " same type in all splits"
            )
    return splits, columns


def _sound(rows: ParquetRows, column: str) -> pa.ChunkedArray:
    """Return the column, checked: a value in every row, of a type that can be numbered."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = rows.column(column)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if values.null_count:
        row = int(pc.index(pc.is_null(values), True).as_py())
        raise DataError(f"{rows.place(row)} has no value in '{column}'; every row needs one")
    kind = values.type
    if not (
        _is_number(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_boolean(kind)
    ):
        raise DataError(
            f"{rows.paths[0]}: column '{column}' holds {kind}, expected whole numbers, words or booleans"
        )
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        words = values.cast(pa.large_binary()).to_pylist()
        row = next((row for row, word in enumerate(words) if "\ufffd" in word.decode(errors="replace")), 0)
        raise DataError(
            f"{rows.place(row)} has a word in '{column}' that is not UTF-8; write the file again as UTF-8"
        ) from None
    return values


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_whole(values: np.ndarray) -> np.ndarray:
    return (
        np.isfinite(values) & (values == np.floor(values))
        if values.dtype.kind == "f"
        else np.ones(len(values), bool)
    )


def _numbers(
    splits: list[ParquetRows],
    column: str,
    columns: list[pa.ChunkedArray],
    classes: int | None,
    names: tuple[str, ...],
) -> Labels:
    raw = [np.asarray(one.to_numpy()) for one in columns]
    named = [split.class_names(column) for split in splits]
    common = next(filter(None, named), ())
    names = names or common
    if classes is None:
        classes = len(names) or None
    if names and classes is not None and len(names) != classes:
        raise DataError(
            f"{splits[0].paths[0]}: column '{column}' names {len(names)} classes, expected {classes};"
            " check that it is the right dataset"
        )
    total = sum(map(len, raw))
    for rows, values in zip(splits, raw, strict=True):
        wrong = ~(_is_whole(values) & (values >= 0) & (values < (total if classes is None else classes)))
        if wrong.any():
            row = int(wrong.argmax())
            none = "which means no label on the Hub; " + (
                _UNLABELLED if rows is not splits[0] else "remove such rows"
            )
            expected = none if values[row] == -1 else _expected(classes, total)
            raise DataError(f"{rows.place(row)} has label {values[row]!s} in '{column}', {expected}")
    numbers = [values.astype(np.int64) for values in raw]
    labels = np.concatenate(
        [_renamed(*one, common, column) for one in zip(splits, numbers, named, strict=True)]
    )
    return labels, classes if classes is not None else int(labels.max()) + 1, names


def _renamed(
    rows: ParquetRows, labels: np.ndarray, names: tuple[str, ...], common: tuple[str, ...], column: str
) -> np.ndarray:
    """Renumber the labels of a split that lists the same classes in another order: the name decides."""
    if not names or names == common:
        return labels
    if sorted(names) != sorted(common) or len(set(names)) < len(names):
        raise DataError(
            f"{rows.paths[0]}: column '{column}' names other classes than the train split; check that"
            " both are of one dataset"
        )
    return np.array([common.index(name) for name in names], dtype=np.int64)[labels]


def _expected(classes: int | None, total: int) -> str:
    if classes is not None:
        return f"expected whole numbers 0..{classes - 1}"
    return f"expected whole numbers from 0 on, less than the number of rows, {total}"


def _words(
    splits: list[ParquetRows],
    column: str,
    columns: list[pa.ChunkedArray],
    classes: int | None,
    names: tuple[str, ...],
) -> Labels:
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = [pc.cast(one, pa.large_string()) for one in columns]  # booleans too: false, true
    present = sorted(set().union(*(pc.unique(one).to_pylist() for one in texts)))
    known = names or tuple(present)
    if classes is not None and len(known) != classes:
        raise DataError(
            f"{splits[0].paths[0]}: column '{column}' has {len(known)} different labels, expected {classes}"
        )
    number = pa.array(known, pa.large_string())
    out = []
    for rows, one in zip(splits, texts, strict=True):
        found = pc.index_in(one, value_set=number)
        if found.null_count:
            row = int(pc.index(pc.is_null(found), True).as_py())
            word = one[row].as_py()
            raise DataError(
                f"{rows.place(row)} has label '{word}' in '{column}', which is not one of the"
                f" classes{suggest(word, known)}"
            )
        out.append(np.asarray(found.to_numpy()).astype(np.int64))
    return np.concatenate(out), len(known), known
