"""Encoded images in a Parquet file, as the Hugging Face Hub stores them, to one array of bytes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import DataError, suggest

IMAGE_COLUMNS = ("image", "img")


def read_images(path: Path, mode: str, label: str = "label") -> tuple[np.ndarray, np.ndarray]:
    """uint8 [N, channels, height, width] and int64 [N]; mode is Pillow's (L: grey, RGB: colour)."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError("Parquet datasets need pyarrow: pip install pyarrow") from None
    try:
        file = pq.ParquetFile(path)
        column = _image_column(path, file.schema_arrow.names, label)
        images: list[np.ndarray] = []
        labels: list[Any] = []
        for batch in file.iter_batches(batch_size=1024, columns=[column, label]):
            labels += batch.column(label).to_pylist()
            for item in batch.column(column).to_pylist():
                images.append(_decode(item, path, len(images), mode))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet, fetch it again: {error}") from None
    if not images:
        raise DataError(f"{path} has no rows")
    return _stack(images, path), _labels(labels, path)


def _image_column(path: Path, names: list[str], label: str) -> str:
    column = next((name for name in IMAGE_COLUMNS if name in names), None)
    if column is None:
        raise DataError(f"{path}: no column '{IMAGE_COLUMNS[0]}' or '{IMAGE_COLUMNS[1]}'{suggest('image', names)}")
    if label not in names:
        raise DataError(f"{path}: no column '{label}'{suggest(label, names)}")
    return column


def _decode(item: Any, path: Path, row: int, mode: str) -> np.ndarray:
    """One image, given as bytes or as the Hub's {bytes, path}."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("image datasets need Pillow: pip install pillow") from None
    encoded = item.get("bytes") if isinstance(item, dict) else item
    if not isinstance(encoded, bytes):
        raise DataError(f"{path}: row {row} holds no image bytes (only files with embedded images can be read)")
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            pixels = np.asarray(image.convert(mode), dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow raises any of them
        raise DataError(f"{path}: row {row} is not a readable image: {error}") from None
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _stack(images: list[np.ndarray], path: Path) -> np.ndarray:
    odd = next((row for row, image in enumerate(images) if image.shape != images[0].shape), None)
    if odd is not None:
        raise DataError(f"{path}: images differ in size, row 0 is {images[0].shape} and row {odd} is {images[odd].shape}")
    return np.stack(images)


def _labels(labels: list[Any], path: Path) -> np.ndarray:
    wrong = next((row for row, label in enumerate(labels) if not isinstance(label, int) or label < 0), None)
    if wrong is not None:
        raise DataError(f"{path}: row {wrong} has label {labels[wrong]!r}, expected a class number")
    return np.array(labels, dtype=np.int64)
