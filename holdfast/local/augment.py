"""Augment image batches by key: the change of an image depends only on its client's key and its slot in the
batch.

Therefore a client gets the same images alone and within a stack, and padding a batch does not change the
slots before the padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import setting


class Augment(BaseModel):
    """Random changes of training images, applied in the order crop, flip, rotation, jitter; a setting of 0
    leaves a change out."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    crop: int = setting(0, "reflect-pad by this many pixels, then cut a random window of the old size", ge=0)
    flip: float = setting(0.0, "probability of a horizontal flip", ge=0, le=1)
    rotation: float = setting(0.0, "largest rotation in degrees, either way", ge=0, le=180)
    jitter: float = setting(
        0.0, "strength j of brightness, contrast and saturation: factors within [1 - j, 1 + j]", ge=0, le=1
    )

    @property
    def active(self) -> bool:
        return any(getattr(self, name) for name in type(self).model_fields)

    def check(self, sample_shape: tuple[int, ...]) -> None:
        """Raise an error for samples that cannot be augmented."""
        if not self.active:
            return
        if len(sample_shape) != 3:
            raise ConfigError(
                "augment needs images [channels, height, width], but a sample has shape"
                f" {list(sample_shape)}; leave it out"
            )
        smallest = min(sample_shape[1:])
        if self.crop >= smallest:
            raise ConfigError(
                f"augment.crop = {self.crop} must be smaller than the image"
                f" ({sample_shape[1]}x{sample_shape[2]})"
            )

    def __call__(self, x: Tensor, key: Key) -> Tensor:
        """Augment x [n, B, C, H, W], which is normalised, with one key per row; the shape does not change."""
        self.check(tuple(x.shape[2:]))
        if not self.active or not x.numel():
            return x
        key, batch = key.to(x.device), x.shape[1]
        if self.crop:
            shifts = key.fold("crop").hash(batch, 2).remainder(2 * self.crop + 1) - self.crop
            x = shift(x, shifts[..., 0], shifts[..., 1])
        if self.flip:
            flipped = key.fold("flip").uniform(batch) < self.flip
            x = torch.where(_per_image(flipped), x.flip(-1), x)
        if self.rotation:
            x = rotate(x, self._factor(key.fold("rotation"), batch, self.rotation))
        if self.jitter:
            x = self._jitter(x, key.fold("jitter"))
        return x

    def _jitter(self, x: Tensor, key: Key) -> Tensor:
        """Jitter normalised values. Brightness scales them about 0, the mean of the data; they have no fixed
        range, so no value is clamped."""
        brightness, contrast, saturation = (
            _per_image(1 + self._factor(key.fold(name), x.shape[1], self.jitter)).to(x.dtype)
            for name in ("brightness", "contrast", "saturation")
        )
        x = x * brightness
        # The means are taken in float64: the order of a sum depends on the size of the stack, and rounding to
        # float32 afterwards removes the difference.
        middle = x.mean((2, 3, 4), keepdim=True, dtype=torch.float64).to(x.dtype)
        x = middle + (x - middle) * contrast
        if x.shape[2] != 3:
            return x
        grey = x.mean(2, keepdim=True, dtype=torch.float64).to(x.dtype)
        return grey + (x - grey) * saturation

    @staticmethod
    def _factor(key: Key, batch: int, size: float) -> Tensor:
        """Draw float64 [n, B], uniform in [-size, size)."""
        return (key.uniform(batch, dtype=torch.float64) * 2 - 1) * size


def shift(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Cut image (i, j) of x [n, B, C, H, W] with a window moved by down[i, j] and right[i, j] pixels; beyond
    the edge the image is mirrored."""
    height, width = x.shape[-2:]
    rows = _mirror(torch.arange(height, device=x.device) + down[..., None], height)
    columns = _mirror(torch.arange(width, device=x.device) + right[..., None], width)
    x = x.gather(3, rows[:, :, None, :, None].expand_as(x))
    return x.gather(4, columns[:, :, None, None, :].expand_as(x))


def _mirror(index: Tensor, size: int) -> Tensor:
    """Return the source pixels of a reflect-padded line, for at most size - 1 pixels beyond either end."""
    return (size - 1) - ((size - 1) - index.abs()).abs()


def rotate(x: Tensor, degrees: Tensor) -> Tensor:
    """Rotate image (i, j) of x [n, B, C, H, W] anticlockwise about its centre by degrees[i, j], with bilinear
    interpolation and 0 (the mean of the data) outside.

    The grid is computed here because F.affine_grid multiplies matrices, which TF32 would round."""
    height, width = x.shape[-2:]
    angle = torch.deg2rad(degrees.to(torch.float64)).flatten()[:, None, None]
    # The angles stay in float64 until the end: the last bit of a cosine may depend on its place in the array,
    # and rounding to float32 removes the difference.
    across = (torch.arange(width, device=x.device, dtype=torch.float64) - (width - 1) / 2)[None, None, :]
    down = (torch.arange(height, device=x.device, dtype=torch.float64) - (height - 1) / 2)[None, :, None]
    source_across = across * angle.cos() - down * angle.sin()
    source_down = across * angle.sin() + down * angle.cos()
    grid = torch.stack((source_across * (2 / width), source_down * (2 / height)), -1).to(x.dtype)
    return F.grid_sample(
        x.flatten(0, 1), grid, mode="bilinear", padding_mode="zeros", align_corners=False
    ).view_as(x)


def _per_image(value: Tensor) -> Tensor:
    return value[:, :, None, None, None]
