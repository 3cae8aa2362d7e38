"""What training does to samples before a model sees them, for new samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.data.federation import DataSettings, Samples
from holdfast.data.handed.content import HandedOver


class Normalisation:
    """Mean and deviation of each channel, or one of all. Those of bytes are on the scale 0..1: bytes are
    divided by 255 first."""

    def __init__(self, data: DataSettings, samples: Samples, dtype: str | None):
        self.mean, self.std, self.shape = samples.mean, samples.std, samples.sample_shape
        self.bytes, self.words = samples.x.dtype == torch.uint8, samples.words
        handed = data.options.get("samples")
        self.table = (
            data.name == "table" or isinstance(handed, HandedOver) and handed.content().kind == "table"
        )
        self.dtype = torch.float64 if dtype == "float64" else torch.float32

    def plain(self) -> dict[str, Any]:
        """As JSON holds it: (x / divide_by - mean) / std."""
        return {
            "shape": list(self.shape),
            "divide_by": 255 if self.bytes else 1,
            "mean": list(self.mean),
            "std": list(self.std),
        }

    def __call__(self, X: Any) -> Tensor:
        if self.words or self.table:
            what = "texts" if self.words else "rows of a table"
            raise ConfigError(f"normalise: the samples of this run are {what}, which are encoded, not scaled")
        x = torch.as_tensor(X)
        if tuple(x.shape[max(0, x.ndim - len(self.shape)) :]) != self.shape:
            wanted, found = (" x ".join(map(str, shape)) for shape in (self.shape, x.shape))
            raise ConfigError(f"normalise: the samples of this run have shape {wanted}, not {found}")
        if self.bytes == x.is_floating_point():
            kind = "bytes, 0 to 255" if self.bytes else "numbers with a fraction, such as float32"
            raise ConfigError(f"normalise: the samples of this run were {kind}; X has {x.dtype}")
        mean, std = (torch.tensor(part, dtype=torch.float64) for part in (self.mean, self.std))
        unit = 255.0 if self.bytes else 1.0
        shape = [-1] + [1] * (len(self.shape) - 1)
        shift, scale = ((part * unit).view(shape).to(self.dtype) for part in (mean, std))
        return (x.to(self.dtype) - shift) / scale
