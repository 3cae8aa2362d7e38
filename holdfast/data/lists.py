"""A column of lists of numbers, also of lists of lists, as one array."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from holdfast.core.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from holdfast.data.parquet import Rows


def first_size(rows: Rows, column: str) -> int:
    """How many numbers the first row has."""
    return int(_flat(next(rows.batches([column], 1)).column(0), rows, column)[1][0])


def read_lists(values: pa.Array, width: int, column: str, rows: Rows, before: int) -> np.ndarray:
    """float32 [n, width] of a batch that begins after `before` rows of its split."""
    flat, sizes = _flat(values, rows, column)
    if (sizes != width).any():
        row = int((sizes != width).argmax())
        raise DataError(f"{rows.place(before + row)} has {sizes[row]} numbers in '{column}', expected {width}")
    out = np.asarray(flat).astype(np.float32).reshape(len(values), width)
    if not np.isfinite(out).all():
        row = int((~np.isfinite(out)).any(1).argmax())
        raise DataError(f"{rows.place(before + row)} has a missing or infinite number in '{column}'; leave such rows away")
    return out


def _flat(values: pa.Array, rows: Rows, column: str) -> tuple[pa.Array, np.ndarray]:
    """The numbers end to end, and how many of them each row has; a missing list has none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    flat, bounds = values, np.arange(len(values) + 1)
    while pa.types.is_list(flat.type) or pa.types.is_large_list(flat.type) or pa.types.is_fixed_size_list(flat.type):
        lengths = np.asarray(pc.fill_null(pc.list_value_length(flat), 0))
        bounds = np.concatenate([[0], np.cumsum(lengths)])[bounds]
        flat = flat.flatten()
    if flat is values or not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)):
        raise DataError(f"{rows.paths[0]}: column '{column}' holds {values.type}, not lists of numbers")
    return flat, np.diff(bounds)
