"""A patch in an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.attacks.triggers.base import Change, DataKind, Stamp
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.data.samples import Samples

Place = Literal["top-left", "top-right", "bottom-left", "bottom-right", "centre"]
Pattern = Literal["colour", "noise"]
SIZE, PLACE = "side of the patch in pixels", "where in the image"
PATTERN = "one colour, or fixed random pixels"
COLOUR = "one number for all channels or one for each, from 0 (darkest) to 1 (brightest)"


@register("trigger", "patch", paper="Gu, Dolan-Gavitt and Garg: BadNets, 2017")
class Patch(Stamp):
    """A square of one colour, or of fixed random pixels, in place of what an image shows there."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "for": "images",
        "what it changes": "a square of pixels",
        "settings, with their defaults": (
            '`size = 5`, `place = "bottom-right"`, `pattern = "colour"`, `colour = [1.0]`'
        ),
    }
    fits: ClassVar[frozenset[DataKind]] = frozenset({"image"})
    size: int = setting(5, SIZE, ge=1)
    place: Place = setting("bottom-right", PLACE)
    pattern: Pattern = setting("colour", PATTERN)
    colour: tuple[float, ...] = setting((1.0,), COLOUR)

    def change(self, samples: Samples) -> Change:
        self._check(samples)
        patch, (_, height, width), size = self._patch(samples), samples.sample_shape, self.size
        top = _begin(self.place, "top", height - size)
        left = _begin(self.place, "left", width - size)

        def stamp(x: Tensor) -> Tensor:
            x = x.clone()
            x[..., top : top + size, left : left + size] = patch
            return x

        return stamp

    def _check(self, samples: Samples) -> None:
        channels, height, width = samples.sample_shape
        if self.size > min(height, width):
            raise ConfigError(
                f"attack.size: a patch of {self.size} pixels does not fit into {height} x {width}; make"
                " it smaller"
            )
        if len(self.colour) not in (1, channels) or not all(0 <= c <= 1 for c in self.colour):
            raise ConfigError(f"attack.colour: needs 1 or {channels} numbers from 0 to 1")

    def _patch(self, samples: Samples) -> Tensor:
        """[C, size, size] as images are stored: bytes, or numbers between the smallest and the largest of the
        dataset."""
        channels = samples.sample_shape[0]
        if self.pattern == "noise":
            shade = Key(0).fold("backdoor pattern").uniform(channels, self.size, self.size)
        else:
            shade = torch.tensor(self.colour).view(-1, 1, 1).expand(channels, self.size, self.size)
        return shaded(shade, samples)


def shaded(shade: Tensor, samples: Samples) -> Tensor:
    """Shades from 0 to 1 as images are stored: bytes, or numbers between the smallest and the largest of the
    dataset."""
    if samples.x.dtype == torch.uint8:
        return (shade * 255).round().to(torch.uint8)
    low, high = float(samples.x.min()), float(samples.x.max())
    return low + shade * (high - low)


def _begin(place: Place, first: str, room: int) -> int:
    if place == "centre":
        return room // 2
    return 0 if first in place else room
