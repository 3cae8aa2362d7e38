"""Which rows are for training and which for testing, and where each goes in the sample store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.keys import Key
from holdfast.data.parquet import ParquetRows


@dataclass(frozen=True, eq=False)
class RowOrder:
    """Rows as they are read, and where they go in the sample store: those of the train split first."""

    parts: tuple[ParquetRows, ...]  # read one after the other
    place: np.ndarray  # [N] int64: the row that is read as the i-th becomes row place[i]
    train_rows: int

    @property
    def count(self) -> int:
        return len(self.place)

    def arranged(self, values: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        """Values of the rows as read, one of each, in the order of the sample store."""
        out = np.empty_like(values) if into is None else into
        out[self.place] = values
        return out


def set_aside(count: int, share: float) -> tuple[np.ndarray, int]:
    """Where each of `count` rows goes when a share of them, always the same, is moved behind the others for
    testing; and how many stay."""
    tested = round(count * share)
    if count and tested == count:
        raise DataError(
            f"data.options.test: a share of {share:g} of {count} rows leaves none to train on; lower it"
        )
    chosen = np.zeros(count, dtype=bool)
    chosen[Key(0).fold("set aside").numpy().permutation(count)[:tested]] = True
    place = np.empty(count, dtype=np.int64)
    place[np.argsort(chosen, kind="stable")] = np.arange(count)
    return place, count - tested
