"""Read a column of lists of numbers, or of lists of lists, as one array."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from holdfast.core.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from holdfast.data.parquet import ParquetRows


def first_shape(rows: ParquetRows, column: str) -> tuple[int, ...]:
    """Return the lengths of the first row's lists, level by level: (9, 128) for 9 lists of 128 numbers."""
    _, levels = _flat(next(rows.batches([column], 1)).column(0), rows, column)
    return tuple(int(lengths[0]) if len(lengths) else 0 for lengths in levels)


def read_lists(
    values: pa.Array, shape: tuple[int, ...], column: str, rows: ParquetRows, before: int
) -> np.ndarray:
    """Return float32 [n, numbers] of a batch that begins after `before` rows of its split; all lists must
    have the lengths of the shape."""
    flat, levels = _flat(values, rows, column)
    if len(levels) != len(shape):
        raise DataError(
            f"{rows.paths[0]}: column '{column}' holds {values.type}, but the train split has lists of"
            f" {len(shape)} levels"
        )
    lists = 1  # lists per row at the current level
    for wanted, lengths in zip(shape, levels, strict=True):
        if (lengths != wanted).any():
            at = int((lengths != wanted).argmax())
            what = f"{lengths[at]} numbers" if len(shape) == 1 else f"a list of length {lengths[at]}"
            raise DataError(f"{rows.place(before + at // lists)} has {what} in '{column}', expected {wanted}")
        lists *= wanted
    out = np.asarray(flat).astype(np.float32).reshape(len(values), lists)
    if not np.isfinite(out).all():
        row = int((~np.isfinite(out)).any(1).argmax())
        raise DataError(
            f"{rows.place(before + row)} has a missing or infinite number in '{column}'; remove such rows"
        )
    return out


def _flat(values: pa.Array, rows: ParquetRows, column: str) -> tuple[pa.Array, list[np.ndarray]]:
    """Return the numbers end to end, and for each level the lengths of its lists; a missing list has length
    0."""
    import pyarrow as pa
    import pyarrow.compute as pc

    flat, levels = values, []
    while (
        pa.types.is_list(flat.type)
        or pa.types.is_large_list(flat.type)
        or pa.types.is_fixed_size_list(flat.type)
    ):
        levels.append(np.asarray(pc.fill_null(pc.list_value_length(flat), 0)))
        flat = flat.flatten()
    if not levels or not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)):
        raise DataError(f"{rows.paths[0]}: column '{column}' holds {values.type}, not lists of numbers")
    return flat, levels
