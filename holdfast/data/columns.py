"""Encode columns of a table as numbers for a network: each encoder is fitted to the train split and then
turns values into float32 [rows, width].

A missing value adds no information: a missing number becomes the mean, which is 0 after standardising, and a
missing category sets none of its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from holdfast.core.errors import DataError
from holdfast.data.hashed_words import hash_word

if TYPE_CHECKING:
    import pyarrow as pa

RowPlace = Callable[[int], str]  # names the place of a row, for an error message
ColumnKind = Literal["number", "category", "neither"]


def kind_of(type: pa.DataType) -> ColumnKind:
    """Return what a column's values are, unless the user says otherwise."""
    import pyarrow as pa

    is_ = pa.types
    if is_.is_dictionary(type):
        return kind_of(type.value_type) if not is_.is_integer(type.value_type) else "category"
    if is_.is_integer(type) or is_.is_floating(type) or is_.is_decimal(type) or is_.is_null(type):
        return "number"
    if is_.is_boolean(type) or is_.is_string(type) or is_.is_large_string(type) or is_.is_string_view(type):
        return "category"
    return "neither"


class Number:
    """Standardises by the train split's mean and deviation. A column that is constant in the train split
    becomes 0."""

    width = 1

    def __init__(self, name: str, train: np.ndarray):
        self.name = name
        known = train[~np.isnan(train)]
        self.low, self.high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
        # halves: the distance itself may overflow a float
        self.reach = self.high / 2 - self.low / 2
        if self.reach:
            scaled = self._scaled(known)
            self.mean, self.std = float(scaled.mean()), float(scaled.std())

    def __call__(self, values: np.ndarray, place: RowPlace) -> np.ndarray:
        if not self.reach:
            return np.zeros((len(values), 1), dtype=np.float32)
        with np.errstate(over="ignore"):
            out = np.nan_to_num(
                (self._scaled(values) - self.mean) / self.std, nan=0.0, posinf=np.inf, neginf=-np.inf
            ).astype(np.float32)
        if not np.isfinite(out).all():
            row = int(np.isinf(out).argmax())
            raise DataError(
                f"{place(row)} has {values[row]:g} in '{self.name}', too far from the range"
                f" {self.low:g}..{self.high:g} of the train split; correct it or remove the row"
            )
        return out[:, None]

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        """Scale to 0..1 in the train split: this keeps small differences of large numbers, and no square
        overflows or vanishes."""
        out = values / 2
        out -= self.low / 2
        out /= self.reach
        return out


class Category:
    """Encodes one column for each value of the train split, 1 where a row has it; with more than `buckets`
    values, that many columns, by hash."""

    def __init__(self, train: pa.ChunkedArray, buckets: int):
        import pyarrow.compute as pc

        distinct = pc.unique(_words(train)).drop_null()
        self.known = distinct.take(pc.sort_indices(distinct))
        self.hashed = len(self.known) > buckets
        self.width = buckets if self.hashed else len(self.known)

    def __call__(self, values: pa.Array | pa.ChunkedArray) -> np.ndarray:
        words = _words(values)
        column = self._bucket(words) if self.hashed else _index(words, self.known)
        out = np.zeros((len(words), self.width), dtype=np.float32)
        there = np.flatnonzero(column >= 0)
        out[there, column[there]] = 1
        return out

    def _bucket(self, words: pa.Array | pa.ChunkedArray) -> np.ndarray:
        import pyarrow as pa
        import pyarrow.compute as pc

        distinct = pc.unique(words).drop_null()
        # bytes, because a value need not be valid UTF-8
        plain = distinct.cast(pa.large_binary()).to_pylist()
        bucket = np.array(
            [hash_word(word) % self.width for word in plain] + [-1]
        )  # the last entry is for missing values
        return bucket[_index(words, distinct)]


def numbers(values: pa.Array | pa.ChunkedArray, name: str, place: RowPlace) -> np.ndarray:
    """Return float64 numbers, NaN where a value is missing."""
    import pyarrow as pa

    # not safe: whole numbers beyond 2^53 are rounded
    plain = np.asarray(_plain(values).cast(pa.float64(), safe=False))
    if np.isinf(plain).any():
        raise DataError(
            f"{place(int(np.isinf(plain).argmax()))} has an infinite number in '{name}'; correct it, or"
            " leave the value empty"
        )
    return plain


def _plain(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    import pyarrow as pa

    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def _words(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    import pyarrow as pa

    return _plain(values).cast(pa.large_string())  # so that splits that store them differently agree


def _index(words: pa.Array | pa.ChunkedArray, known: pa.Array) -> np.ndarray:
    """Return the index of each word in the list, -1 where it is missing."""
    import pyarrow.compute as pc

    return np.asarray(pc.fill_null(pc.index_in(words, value_set=known), -1))
