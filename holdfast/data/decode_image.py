"""Decode encoded images into arrays. Processes that do nothing else read this module, so it imports little.

Images are not trusted: only formats that Pillow decodes itself are opened (for an EPS it would start
Ghostscript), and no huge images.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from holdfast.core.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # MPO, which cameras write, is opened as JPEG
PIXELS = 1 << 26  # per image: a few bytes may claim more pixels than memory holds

Mode = Literal["auto", "grey", "colour"]
Place = Callable[[int], str]
"""The place of an image, by its number, for an error message."""
_PILLOW = {"grey": "L", "colour": "RGB"}


@dataclass(frozen=True)
class ImageFormat:
    """The format that images are converted to."""

    # auto: grey if the first images are grey, however they are stored; then all must be grey
    mode: Mode = "auto"
    side: int | None = None  # images are resized to a square of this side; none: all must have the same size
    shape: tuple[int, int] | None = None  # height and width that the images must have
    transposed: bool = False  # the images were stored with rows and columns exchanged


@dataclass(frozen=True)
class ImageDecoder:
    """Decodes images and checks that all have one shape: `mode` and `size` are those of the first."""

    how: ImageFormat
    mode: Mode
    first: tuple[int, int]

    @property
    def size(self) -> tuple[int, int]:
        return (self.how.side, self.how.side) if self.how.side else self.how.shape or self.first

    @property
    def bytes(self) -> int:
        """Of one decoded image."""
        return self.size[0] * self.size[1] * len(_PILLOW[self.mode])

    def __call__(self, items: Sequence[Any], place: Place) -> np.ndarray:
        """Return uint8 [N, channels, height, width]."""
        return np.stack([self._one(item, place, number) for number, item in enumerate(items)])

    def _one(self, item: Any, place: Place, number: int) -> np.ndarray:
        image, mode, size = open_image(item, place, number), _PILLOW[self.mode], self.size
        if self.how.mode == "auto" and self.mode == "grey" and not is_grey(image):
            raise DataError(
                f"{place(number)} is in colour, but the first images are grey; set data.options.mode"
            )
        image = image if image.mode == mode else image.convert(mode)
        if self.how.side and image.size != size:
            image = image.resize(size, resample=2)  # bilinear, averaging over all source pixels
        if (image.height, image.width) != size:
            wanted = (
                "expected" if self.how.shape else "set data.options.size to resize all images, the first is"
            )
            raise DataError(f"{place(number)} is {_by((image.height, image.width))}; {wanted} {_by(size)}")
        pixels = np.asarray(image, dtype=np.uint8)
        pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        return pixels.swapaxes(1, 2) if self.how.transposed else pixels


def open_image(encoded: Any, place: Place, number: int) -> Image:
    """Decode an image into mode L or RGB."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError("image datasets need Pillow; run pip install pillow") from None
    if encoded is None:
        raise DataError(f"{place(number)} holds no image bytes; only files with embedded images can be read")
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
        raise DataError(f"{place(number)} is not a readable image: expected {', '.join(FORMATS)}") from None
    except Exception as error:  # damaged bytes can make Pillow raise anything
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{place(number)} is not a readable image: {why}") from None


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


def is_grey(image: Image) -> bool:
    """Return whether an image is grey, also if it is stored as three equal channels, as WebP does."""
    if image.mode == "L":
        return True
    pixels = np.asarray(image)
    return bool((pixels == pixels[..., :1]).all())


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
