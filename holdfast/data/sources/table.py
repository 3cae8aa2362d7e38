"""Tables: numeric and categorical columns of a folder of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.progress import progress
from holdfast.core.registry import register, setting
from holdfast.data.cache import New
from holdfast.data.columns import Category, Number, kind_of, numbers
from holdfast.data.parquet import ParquetRows
from holdfast.data.row_order import RowOrder
from holdfast.data.sources.labelled import LabelledSource, Scale

BATCH = 16384


@register("source", "table")
class TableSource(LabelledSource):
    """A table of your own: Parquet files whose columns are numbers, words or booleans, one of them the label.

    Numbers are standardised by the train split; words and booleans become one column for each value in the
    train split. A missing value becomes 0. Licence: that of your data.
    """

    encoding: ClassVar[str] = " without index"
    normalise: Literal["dataset"] = setting(
        "dataset", "always dataset: each column is standardised by itself"
    )
    columns: tuple[str, ...] = setting(
        (), "columns to use; default: all but label, user and the index of a pandas frame"
    )
    categorical: tuple[str, ...] = setting((), "columns of numbers that are categories, such as a postcode")
    buckets: int = setting(
        64, "a categorical column with more values than this is hashed into this many columns", ge=1
    )

    def _fill(self, order: RowOrder, new: New) -> Scale:
        names = self._names(order.parts)
        fitted = self._fitted(order, names)
        width = sum(column.width for column in fitted)
        if not width:
            raise DataError(
                f"{order.parts[0].paths[0]}: no column besides '{self.label}' has a value in the train split"
            )
        x, begin = new("x", (order.count, width), np.float32), 0
        with progress(f"encoding {self.name}", order.count) as advance:
            for rows in order.parts:
                at = 0  # row in this split
                for batch in rows.batches(names, BATCH):
                    x[order.place[begin : begin + len(batch)]] = _encoded(batch, names, fitted, rows, at)
                    at, begin = at + len(batch), begin + len(batch)
                    advance(len(batch))
        return (0.0,), (1.0,)

    def columns_used(self, dir: Path | None) -> list[str]:
        """The columns that become inputs of a model."""
        return self._names(self._order(self._files(dir)).parts)

    def _names(self, parts: tuple[ParquetRows, ...]) -> list[str]:
        """Return the columns to use, after checking them."""
        for rows in parts:
            for name in (*self.columns, *self.categorical):
                rows.need(name)
        left_out = (self.label, self.user, *parts[0].index_names)
        names = list(self.columns) or [name for name in parts[0].names if name not in left_out]
        if self.label in names:
            raise DataError(
                f"data.options.columns: '{self.label}' is the label and must not be an input; remove it"
            )
        stray = [name for name in self.categorical if name not in names]
        if stray:
            raise DataError(f"data.options.categorical: '{stray[0]}' is not one of the columns that are used")
        return names

    def _fitted(self, order: RowOrder, names: list[str]) -> list[Number | Category]:
        """Fit the encoder of each column to the rows of the train split, one column after the other."""
        import pyarrow as pa

        fitted: list[Number | Category] = []
        rows = order.parts[0]
        # all rows, unless a share of them is set aside for testing
        train = order.place[: rows.count] < order.train_rows
        # a column is not bound to a name here, so that its memory is freed as soon as it is encoded
        for name in names:
            if self._kind(order.parts, name) == "number":
                fitted.append(Number(name, numbers(rows.column(name), name, rows.place)[train]))
            else:
                fitted.append(Category(rows.column(name).filter(pa.array(train)), self.buckets))
        return fitted

    def _kind(self, parts: tuple[ParquetRows, ...], name: str) -> str:
        kinds = ["category" if name in self.categorical else kind_of(rows.type_of(name)) for rows in parts]
        for rows, kind in zip(parts, kinds, strict=True):
            if kind == "neither":
                raise DataError(
                    f"{rows.paths[0]}: column '{name}' holds {rows.type_of(name)}, neither numbers nor"
                    " words; list the columns to use in data.options.columns"
                )
            if kind != kinds[0]:
                raise DataError(
                    f"{rows.paths[0]}: column '{name}' holds {rows.type_of(name)}, but"
                    f" {parts[0].type_of(name)} in the train split"
                )
        return kinds[0]


def _encoded(
    batch: Any, names: list[str], fitted: list[Number | Category], rows: ParquetRows, before: int
) -> np.ndarray:
    """Return float32 [n, width] of a batch that begins after `before` rows of its split."""

    def place(row: int) -> str:
        return rows.place(before + row)

    out = []
    for name, column in zip(names, fitted, strict=True):
        values = batch.column(name)
        out.append(
            column(numbers(values, name, place), place) if isinstance(column, Number) else column(values)
        )
    return np.concatenate(out, axis=1)
