"""Mean and deviation of each channel, gathered piece by piece while data is decoded."""

from __future__ import annotations

import numpy as np


class Moments:
    """Of arrays [n, channels, ...]; bytes count as 0..1, as in the sample store."""

    def __init__(self) -> None:
        self.count = 0
        self._mean: np.ndarray | None = None
        self._squares: np.ndarray | None = None  # sums of squared distances from the mean

    def add(self, x: np.ndarray) -> None:
        if not x.size:
            return
        flat = np.moveaxis(x.reshape(len(x), x.shape[1] if x.ndim > 1 else 1, -1), 1, 0).reshape(x.shape[1] if x.ndim > 1 else 1, -1)
        values = flat.astype(np.float64)
        if x.dtype == np.uint8:
            values /= 255
        count, mean = values.shape[1], values.mean(1)
        squares = ((values - mean[:, None]) ** 2).sum(1)
        if self._mean is None or self._squares is None:
            self.count, self._mean, self._squares = count, mean, squares
            return
        apart, total = mean - self._mean, self.count + count
        self._squares = self._squares + squares + apart**2 * (self.count * count / total)
        self._mean = self._mean + apart * (count / total)
        self.count = total

    @property
    def mean(self) -> tuple[float, ...]:
        return () if self._mean is None else tuple(map(float, self._mean))

    @property
    def std(self) -> tuple[float, ...]:
        """A channel that never changes has deviation 1: there is nothing to scale."""
        if self._squares is None:
            return ()
        spread = np.sqrt(self._squares / self.count)
        return tuple(map(float, np.where(spread > 1e-9, spread, 1.0)))
