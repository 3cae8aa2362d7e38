"""The base class of triggers: what is changed in a sample so that a poisoned model answers with the
target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.core.registry import Part
from holdfast.data.samples import Samples

Change = Callable[[Tensor], Tensor]
"""Puts a trigger into samples [n, ...] as they are stored, and returns new ones."""
DataKind = Literal["image", "window", "text", "table", "other"]
IN_WORDS: dict[DataKind, str] = {
    "image": "an image",
    "window": "a sensor window",
    "text": "a text",
    "table": "a row of a table",
    "other": "of another shape",
}


def kind_of(samples: Samples) -> DataKind:
    """What a sample is: words are a text; of numbers, [C, H, W] is an image, [channels, steps] a sensor
    window and [columns] a row of a table."""
    if samples.words:
        return "text"
    kinds: dict[int, DataKind] = {3: "image", 2: "window", 1: "table"}
    return kinds.get(len(samples.sample_shape), "other")


class Stamp(Part):
    """A trigger: what is changed in a sample. A subclass defines `change`, and checks in it that its settings
    fit the samples."""

    fits: ClassVar[frozenset[DataKind]] = frozenset()
    """The kinds of data that it is for."""

    def on(self, samples: Samples) -> Change:
        """The trigger for these samples; an error where it is not for such data."""
        kind = kind_of(samples)
        if kind not in self.fits:
            meant = " or ".join(IN_WORDS[each] for each in IN_WORDS if each in self.fits)
            raise ConfigError(
                f"attack.trigger: '{self.name}' changes {meant}, but a sample of {samples.name} is"
                f" {IN_WORDS[kind]}; `holdfast list triggers` says what each is for"
            )
        return self.change(samples)

    def change(self, samples: Samples) -> Change:
        raise TypeError(f"{type(self).__name__} does not define what it changes")

    def parts(self, samples: Samples, count: int) -> Sequence[Change]:
        """The trigger in `count` parts that together are the whole: its places (pixels, steps of channels,
        columns) in their order, divided as evenly as possible."""
        whole = self.on(samples)
        places = changed(whole, samples)
        if int(places.sum()) < count:
            raise ConfigError(
                f"attack.parts: the trigger '{self.name}' changes {int(places.sum())} places of a sample, too"
                f" few for {count} parts; make the trigger larger, or take fewer parts"
            )
        order = places.flatten().nonzero().flatten()
        masks = []
        for piece in order.tensor_split(count):
            mask = torch.zeros(places.numel(), dtype=torch.bool)
            mask[piece] = True
            masks.append(mask.view(places.shape))
        return [within(whole, mask) for mask in masks]


def changed(change: Change, samples: Samples) -> Tensor:
    """The places that a trigger changes, without the channels of an image: what it changes in a sample of
    zeros or in one of ones."""
    flat = torch.stack([torch.full(samples.sample_shape, level, dtype=samples.x.dtype) for level in (0, 1)])
    differs = (change(flat.clone()) != flat).any(0)
    return differs.any(0) if kind_of(samples) == "image" else differs


def within(change: Change, mask: Tensor) -> Change:
    """A change in some places only."""

    def part(x: Tensor) -> Tensor:
        return torch.where(mask, change(x), x)

    return part


def scale_of(samples: Samples) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation by which the model's inputs are normalised, in the units of the store: one
    number, or one for each channel (column, where a sample is a row of a table)."""
    unit = 255.0 if samples.x.dtype == torch.uint8 else 1.0
    mean, std = (torch.tensor(values, dtype=torch.float64) * unit for values in (samples.mean, samples.std))
    return mean, std


def stored(values: Tensor, like: Tensor) -> Tensor:
    """Numbers as the store has them: bytes are rounded and kept from 0 to 255."""
    if like.dtype == torch.uint8:
        return values.round().clamp(0, 255).to(torch.uint8)
    return values.to(like.dtype)
