"""Compute the mean and deviation of each channel, piece by piece while data is decoded."""

from __future__ import annotations

import numpy as np

_LEVELS = np.arange(256) / 255
_FINEST = np.finfo(np.float32)  # samples are normalised in float32


class Moments:
    """Mean and deviation of arrays [n, channels, ...]; bytes count as 0..1, as in the sample store."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._squares = np.zeros(0)  # sums of squared distances from the mean
        self._low = self._high = np.zeros(0)

    def add(self, x: np.ndarray) -> None:
        if not x.size:
            return
        count, (mean, squares) = x.size // x.shape[1], _of(x)
        others = tuple(axis for axis in range(x.ndim) if axis != 1)
        low, high = x.min(others), x.max(others)
        if not self.count:
            self.count, self._mean, self._squares, self._low, self._high = count, mean, squares, low, high
            return
        self._low, self._high = np.minimum(self._low, low), np.maximum(self._high, high)
        apart, total = mean - self._mean, self.count + count
        self._squares = self._squares + squares + apart**2 * (self.count * count / total)
        self._mean = self._mean + apart * (count / total)
        self.count = total

    @property
    def mean(self) -> tuple[float, ...]:
        return tuple(map(float, self._mean))

    @property
    def std(self) -> tuple[float, ...]:
        """The deviation of each channel. It is 1 for a channel that never changes, and for one that changes
        by less than float32 resolves at the size of its mean, where normalising would only amplify noise. A
        channel of small values is scaled like any other."""
        spread = np.sqrt(self._squares / max(self.count, 1))
        resolution = np.maximum(_FINEST.eps * np.abs(self._mean), _FINEST.tiny)
        return tuple(map(float, np.where((self._low < self._high) & (spread > resolution), spread, 1.0)))


def _of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    channels = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)
    if x.dtype == np.uint8:  # from the counts of each level, without floats for every pixel
        often = np.stack([np.bincount(channel, minlength=256) for channel in channels])
        mean = often @ _LEVELS / channels.shape[1]
        return mean, (often * (_LEVELS - mean[:, None]) ** 2).sum(1)
    values = channels.astype(np.float64)
    mean = values.mean(1)
    return mean, ((values - mean[:, None]) ** 2).sum(1)
