"""Data generated from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.data.samples import Samples
from holdfast.data.sources.base import Source


@register("source", "synthetic")
class Synthetic(Source):
    """Gaussian blobs, one per class, as bytes: for tests and timings, generated from a seed of its own."""

    mean: ClassVar[tuple[float, ...]] = (128 / 255,)
    std: ClassVar[tuple[float, ...]] = (32 / 255,)
    samples: int = setting(2000, "number of rows", ge=1)
    test: float = setting(0.2, "share of rows in the test split", ge=0, lt=1)
    shape: tuple[int, ...] = setting((1, 28, 28), "shape of one sample", min_length=1)
    classes: int = setting(10, "number of classes, of equal size", ge=1)
    separation: float = setting(6.0, "expected distance of two centres, in deviations of the noise", ge=0)
    seed: int = setting(0, "random seed of the samples; independent of the experiment's seed")

    def load(self, dir: Path | None) -> Samples:
        if min(self.shape) < 1:
            raise DataError(f"data.options.shape: every side must be 1 or more, not {list(self.shape)}")
        key, width = Key(self.seed).fold("synthetic"), int(np.prod(self.shape))
        y = key.fold("labels").numpy().permutation(np.arange(self.samples) % self.classes)
        centres = key.fold("centres").numpy().standard_normal((self.classes, width), dtype=np.float32)
        centres *= self.separation / np.sqrt(2 * width)
        x = np.empty((self.samples, width), dtype=np.uint8)
        noise = key.fold("noise").numpy()
        # in pieces: as floats, 70,000 images would need four times the bytes
        for begin in range(0, self.samples, 4096):
            rows = y[begin : begin + 4096]
            blob = centres[rows] + noise.standard_normal((len(rows), width), dtype=np.float32)
            x[begin : begin + 4096] = np.clip(np.round(128 + 32 * blob), 0, 255)
        return self._samples(
            x.reshape(-1, *self.shape), y, self.classes, self.samples - int(self.samples * self.test)
        )
