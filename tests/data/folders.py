"""Small folders of Parquet files in the layouts of the Hub."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def write_table(
    path: Path, columns: Mapping[str, Any], names: Mapping[str, Sequence[str]] | None = None, rows: int = 2
) -> Path:
    """One file, in groups of so many rows; `names` are the Hub's class names of a column."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(dict(columns))
    if names:
        features = {column: {"names": list(known), "_type": "ClassLabel"} for column, known in names.items()}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=rows)
    return path


def encode(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    file = io.BytesIO()
    (
        image.fromarray(pixels).save(file, kind, lossless=True)
        if kind == "WEBP"
        else image.fromarray(pixels).save(file, kind)
    )
    return file.getvalue()


def wrapped(images: Sequence[Any], kind: str = "PNG") -> list[dict[str, Any]]:
    """As the Hub stores images."""
    return [
        {"bytes": encode(pixels, kind) if isinstance(pixels, np.ndarray) else pixels, "path": None}
        for pixels in images
    ]


def write_images(
    folder: Path,
    images: list[Any],
    labels: list[Any],
    column: str = "image",
    kind: str = "PNG",
    wrap: bool = True,
    label: str = "label",
) -> None:
    """Three quarters train, the rest test."""
    items: list[Any] = wrapped(images, kind)
    if not wrap:
        items = [item["bytes"] for item in items]
    half = len(items) * 3 // 4
    for name, part in (("train", slice(0, half)), ("test", slice(half, None))):
        write_table(folder / f"{name}.parquet", {column: items[part], label: labels[part]})


def grey(count: int = 8, side: int = 28) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (side, side), dtype=np.uint8) for _ in range(count)]


def colour(count: int = 8, side: int = 32) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, (side, side, 3), dtype=np.uint8) for _ in range(count)]
