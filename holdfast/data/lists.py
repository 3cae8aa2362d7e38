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
    values = next(rows.batches([column], 1)).column(0)
    return int(_sizes(values)[1][0])


def read_lists(values: pa.Array, width: int, column: str, rows: Rows, before: int) -> np.ndarray:
    """float32 [n, width] of a batch that begins after `before` rows of its split."""
    import pyarrow as pa

    flat, sizes = _sizes(values)
    if not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)) or flat is values:
        raise DataError(f"{rows.paths[0]}: column '{column}' holds {values.type}, not lists of numbers")
    if (sizes != width).any():
        row = int((sizes != width).argmax())
        raise DataError(f"{rows.place(before + row)} has {sizes[row]} numbers in '{column}', expected {width}")
    out = flat.to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(values), width)
    if not np.isfinite(out).all():
        row = int((~np.isfinite(out)).any(1).argmax())
        raise DataError(f"{rows.place(before + row)} has a missing or infinite number in '{column}'; leave such rows away")
    return out


def _sizes(values: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """The numbers end to end, and how many of them each row has; a missing list has none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    bounds = np.arange(len(values) + 1)
    while pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or pa.types.is_fixed_size_list(values.type):
        lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
        bounds = np.concatenate([[0], np.cumsum(lengths)])[bounds]
        values = values.flatten()
    return values, np.diff(bounds)
