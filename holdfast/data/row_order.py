"""Decide which rows are for training and which for testing, and their place in the sample store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.keys import Key
from holdfast.data.parquet import ParquetRows


@dataclass(frozen=True, eq=False)
class RowOrder:
    """Rows in the order in which they are read, and their place in the sample store: train rows first."""

    parts: tuple[ParquetRows, ...]  # read one after the other
    place: np.ndarray  # [N] int64: the i-th row that is read becomes row place[i]
    train_rows: int

    @property
    def count(self) -> int:
        return len(self.place)

    def arranged(self, values: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        """Return values, one for each row as read, in the order of the sample store."""
        out = np.empty_like(values) if into is None else into
        out[self.place] = values
        return out


def set_aside(count: int, share: float) -> tuple[np.ndarray, int]:
    """Set aside a share of the rows for testing, always the same ones, and move them behind the others.
    Return the place of each of `count` rows and the number of train rows."""
    tested = round(count * share)
    if count and tested == count:
        raise DataError(
            f"data.options.test: a share of {share:g} of {count} rows leaves none for training; lower it"
        )
    chosen = np.zeros(count, dtype=bool)
    chosen[Key(0).fold("set aside").numpy().permutation(count)[:tested]] = True
    place = np.empty(count, dtype=np.int64)
    place[np.argsort(chosen, kind="stable")] = np.arange(count)
    return place, count - tested
