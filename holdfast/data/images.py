"""Decode a column of encoded images, as the Hugging Face Hub stores them, into one array of bytes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.progress import progress
from holdfast.data.cache import New
from holdfast.data.decode_image import ImageDecoder, ImageFormat, Mode, is_grey, open_image
from holdfast.data.image_processes import Block, decoded
from holdfast.data.moments import Moments
from holdfast.data.parquet import ParquetRows
from holdfast.data.row_order import RowOrder

COLUMNS = ("image", "img")
LOOKED_AT = 256  # number of first images that decide between grey and colour
AT_ONCE = 1 << 24  # bytes of decoded images that are written together


def decode_images(
    order: RowOrder, column: str, how: ImageFormat, new: New, title: str, moments: Moments | None = None
) -> None:
    """Fill x, uint8 [N, channels, height, width], with the images of a column; add the train rows to
    `moments`."""
    begin, x = 0, None
    with progress(f"decoding {title}", order.count) as advance, warnings.catch_warnings():
        # Pillow's warning about huge images: they are an error here
        warnings.filterwarnings("ignore", r"Image size \(")
        decoder = ImageDecoder(how, *_first_look(order.parts[0], column, how))
        for pixels in decoded(decoder, _blocks(order, column, decoder), order.count):
            if x is None:
                x = new("x", (order.count, *pixels.shape[1:]), np.uint8)
            place = order.place[begin : begin + len(pixels)]
            x[place] = pixels
            if moments is not None:
                moments.add(pixels[place < order.train_rows])
            begin += len(pixels)
            advance(len(pixels))


def _blocks(order: RowOrder, column: str, decoder: ImageDecoder) -> Iterator[Block]:
    """All images as they are stored, in the order in which they are read, and their places in the files."""
    at_once = min(max(AT_ONCE // decoder.bytes, 1), 1024)
    for rows in order.parts:
        at = 0  # row in this split
        for items in _encoded(rows, column, at_once):
            yield items, partial(_place, rows, at)
            at += len(items)


def _place(rows: ParquetRows, first: int, number: int) -> str:
    return rows.place(first + number)


def _first_look(rows: ParquetRows, column: str, how: ImageFormat) -> tuple[Mode, tuple[int, int]]:
    """Return grey or colour, and the first image's height and width."""
    items = next(_encoded(rows, column, LOOKED_AT))
    first = open_image(items[0], rows.place, 0)
    mode = how.mode
    if mode == "auto":
        mode = (
            "grey"
            if all(is_grey(open_image(item, rows.place, i)) for i, item in enumerate(items))
            else "colour"
        )
    return mode, (first.height, first.width)


def _encoded(rows: ParquetRows, column: str, at_once: int) -> Iterator[list[Any]]:
    """Yield the images as they are stored, bytes or the Hub's {bytes, path}, in batches."""
    import pyarrow as pa

    for batch in rows.batches([column], at_once):
        stored = batch.column(0)
        if pa.types.is_struct(stored.type) and stored.type.get_field_index("bytes") >= 0:
            stored = stored.field("bytes")
        if not (pa.types.is_binary(stored.type) or pa.types.is_large_binary(stored.type)):
            raise DataError(
                f"{rows.paths[0]}: column '{column}' holds {stored.type}, not encoded images; set"
                " data.options.image"
            )
        if len(stored):
            yield stored.to_pylist()
