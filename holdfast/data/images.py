"""Decode a column of encoded images, as the Hugging Face Hub stores them, into one array of bytes.

Files are not trusted: only formats that Pillow decodes itself are opened (for an EPS it would start
Ghostscript), and no huge images.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.progress import progress
from holdfast.data.cache import New
from holdfast.data.moments import Moments
from holdfast.data.parquet import ParquetRows
from holdfast.data.row_order import RowOrder

if TYPE_CHECKING:
    from PIL.Image import Image

COLUMNS = ("image", "img")
LOOKED_AT = 256  # number of first images that decide between grey and colour
AT_ONCE = 1 << 24  # bytes of decoded images that are written together
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # MPO, which cameras write, is opened as JPEG
PIXELS = 1 << 26  # per image: a few bytes may claim more pixels than memory holds

Mode = Literal["auto", "grey", "colour"]
_PILLOW = {"grey": "L", "colour": "RGB"}


@dataclass(frozen=True)
class ImageFormat:
    """The format that images are converted to."""

    # auto: grey if the first images are grey, however they are stored; then all must be grey
    mode: Mode = "auto"
    side: int | None = None  # images are resized to a square of this side; none: all must have the same size
    shape: tuple[int, int] | None = None  # height and width that the images must have
    transposed: bool = False  # the images were stored with rows and columns exchanged


def decode_images(
    order: RowOrder, column: str, how: ImageFormat, new: New, title: str, moments: Moments | None = None
) -> None:
    """Fill x, uint8 [N, channels, height, width], with the images of a column; add the train rows to
    `moments`."""
    begin, x = 0, None
    with progress(f"decoding {title}", order.count) as advance, warnings.catch_warnings():
        # Pillow's warning about huge images: they are an error here
        warnings.filterwarnings("ignore", r"Image size \(")
        decoder = _Decoder(how, *_first_look(order.parts[0], column, how))
        for rows in order.parts:
            at = 0  # row in this split
            for items in _encoded(rows, column, decoder.at_once):
                pixels = np.stack([decoder(item, rows, at + i) for i, item in enumerate(items)])
                if x is None:
                    x = new("x", (order.count, *pixels.shape[1:]), np.uint8)
                place = order.place[begin : begin + len(items)]
                x[place] = pixels
                if moments is not None:
                    moments.add(pixels[place < order.train_rows])
                at, begin = at + len(items), begin + len(items)
                advance(len(items))


class _Decoder:
    """Decodes images one by one and checks that all have one shape."""

    def __init__(self, how: ImageFormat, mode: Mode, size: tuple[int, int]):
        self.how, self.mode, self.strict = how, _PILLOW[mode], how.mode == "auto" and mode == "grey"
        self.size = (how.side, how.side) if how.side else how.shape or size
        self.at_once = min(max(AT_ONCE // (self.size[0] * self.size[1] * len(self.mode)), 1), 1024)

    def __call__(self, item: Any, rows: ParquetRows, row: int) -> np.ndarray:
        image = _open(item, rows, row)
        if self.strict and not _is_grey(image):
            raise DataError(
                f"{rows.place(row)} is in colour, but the first images are grey; set data.options.mode"
            )
        image = image if image.mode == self.mode else image.convert(self.mode)
        if self.how.side and image.size != self.size:
            image = image.resize(self.size, resample=2)  # bilinear, averaging over all source pixels
        if (image.height, image.width) != self.size:
            wanted = (
                "expected" if self.how.shape else "set data.options.size to resize all images, the first is"
            )
            raise DataError(
                f"{rows.place(row)} is {_by((image.height, image.width))}; {wanted} {_by(self.size)}"
            )
        pixels = np.asarray(image, dtype=np.uint8)
        pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        return pixels.swapaxes(1, 2) if self.how.transposed else pixels


def _first_look(rows: ParquetRows, column: str, how: ImageFormat) -> tuple[Mode, tuple[int, int]]:
    """Return grey or colour, and the first image's height and width."""
    items = next(_encoded(rows, column, LOOKED_AT))
    first = _open(items[0], rows, 0)
    mode = how.mode
    if mode == "auto":
        mode = "grey" if all(_is_grey(_open(item, rows, i)) for i, item in enumerate(items)) else "colour"
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


def _open(encoded: Any, rows: ParquetRows, row: int) -> Image:
    """Decode an image into mode L or RGB."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError("image datasets need Pillow; run pip install pillow") from None
    if encoded is None:
        raise DataError(
            f"{rows.place(row)} holds no image bytes; only files with embedded images can be read"
        )
    try:
        image: Image.Image = Image.open(io.BytesIO(encoded), formats=FORMATS)
        if image.width * image.height > PIXELS:
            raise DataError(
                f"{_by((image.height, image.width))} pixels are more than the limit of {PIXELS:,}; make"
                " it smaller"
            )
        image.load()
        return _plain(image)
    except UnidentifiedImageError:
        raise DataError(f"{rows.place(row)} is not a readable image: expected {', '.join(FORMATS)}") from None
    except Exception as error:  # damaged bytes can make Pillow raise anything
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{rows.place(row)} is not a readable image: {why}") from None


def _plain(image: Image) -> Image:
    """Convert to 8 bits per channel without transparency: 16 bits are scaled down, transparent pixels are put
    on white."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        # 65535 is 257 * 255
        return Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(
            f"pixels of mode {image.mode} have no fixed range, expected 8 or 16 bits per channel;"
            " convert the image"
        )
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert(
            "RGB"
        )
    return image if image.mode in ("L", "RGB") else image.convert("L" if image.mode == "1" else "RGB")


def _is_grey(image: Image) -> bool:
    """Return whether an image is grey, also if it is stored as three equal channels, as WebP does."""
    if image.mode == "L":
        return True
    pixels = np.asarray(image)
    return bool((pixels == pixels[..., :1]).all())


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
