"""The embedded digits: data for a first run, without a network connection or a folder."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

import numpy as np

from holdfast.core.registry import register
from holdfast.data.samples import Samples
from holdfast.data.sources.base import Source


@register(
    "source", "digits", paper="Alpaydin and Kaynak: Optical Recognition of Handwritten Digits, UCI, 1998"
)
class Digits(Source):
    """1,797 handwritten digits of 8 x 8 pixels, embedded: 1,437 train, 360 test, in the original order.

    Origin: the test set of UCI's "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998),
    the file digits.csv.gz of scikit-learn, unchanged. Licence: CC BY 4.0. The grey values 0..16 are stretched
    to 0..255, as in other image datasets.
    """

    mean: ClassVar[tuple[float, ...]] = (0.3054,)
    std: ClassVar[tuple[float, ...]] = (0.3753,)

    def load(self, dir: Path | None) -> Samples:
        table = _table()
        x = np.round(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
        return self._samples(x, table[:, 64].copy(), classes=10, train_rows=1437)


@cache
def _table() -> np.ndarray:
    """The file's numbers, one row per digit: 64 grey values and a label. Callers must not change it."""
    text = gzip.decompress((files("holdfast.data") / "digits.csv.gz").read_bytes()).decode()
    return np.array([line.split(",") for line in text.split()], dtype=np.int64)
