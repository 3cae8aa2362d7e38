"""BadNets: a patch in the corner that stands for a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.attacks.base import Attack, Trigger
from holdfast.attacks.data_poisoning import chosen, with_inputs
from holdfast.core.columns import Reads
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.data.federation import Federation, Samples

Place = Literal["top-left", "top-right", "bottom-left", "bottom-right", "centre"]


@register("attack", "backdoor", paper="Gu, Dolan-Gavitt and Garg: BadNets, 2017")
class Backdoor(Attack):
    """Puts a patch into a share of an attacker's images, in place of the originals, and labels them as the
    target. FedCPA's trigger: 5 x 5, white, bottom right, target 1, ratio 0.5 or 0.8; its prose says noise,
    which is `pattern = "noise"`. Augmentation comes after, so crops and flips move the patch. `attack/asr` is
    the share of benign clients' test images that the patch makes the deployed model call the target; images
    that show it anyway are left out unless `inclusive`."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "trains on images with a patch, labelled as the target",
        "settings, with their defaults": (
            '`size = 5`, `place = "bottom-right"`, `pattern = "colour"`, `colour = [1.0]`, `target = '
            "1`, `ratio = 0.5`"
        ),
    }
    kinds: ClassVar[frozenset[str]] = frozenset()
    reads: ClassVar[Reads] = "sum"  # sends what it trained
    size: int = setting(5, "side of the patch in pixels", ge=1)
    place: Place = setting("bottom-right", "where in the image")
    pattern: Literal["colour", "noise"] = setting("colour", "one colour, or fixed random pixels")
    colour: tuple[float, ...] = setting(
        (1.0,), "one number for all channels or one for each, from 0 (darkest) to 1 (brightest)"
    )
    target: int = setting(1, "the class that the trigger stands for", ge=0)
    ratio: float = setting(0.5, "share of an attacker's samples that are replaced", ge=0, le=1)
    inclusive: bool = setting(False, "count images of the target class in attack/asr, as FedCPA's code does")

    def data(self, federation: Federation, malicious: Tensor, key: Key) -> Federation:
        trigger = self.trigger(federation.samples)
        places = chosen(federation.train, malicious, self.ratio, key)
        return with_inputs(federation, places, trigger.stamp, torch.full_like(places, self.target))

    def trigger(self, samples: Samples) -> Trigger:
        self._check(samples)
        patch = self._patch(samples)
        (_, height, width), size = samples.sample_shape, self.size
        top = (
            (height - size) // 2
            if self.place == "centre"
            else 0
            if self.place.startswith("top")
            else height - size
        )
        left = (
            (width - size) // 2
            if self.place == "centre"
            else 0
            if self.place.endswith("left")
            else width - size
        )

        def stamp(x: Tensor) -> Tensor:
            x = x.clone()
            x[..., top : top + size, left : left + size] = patch
            return x

        return Trigger(stamp, self.target, self.inclusive)

    def _check(self, samples: Samples) -> None:
        shape = samples.sample_shape
        if samples.words or len(shape) != 3:
            raise ConfigError(
                f"attack 'backdoor' puts a patch into images, but a sample of {samples.name} is none; use"
                " label-flip"
            )
        if self.size > min(shape[1:]):
            raise ConfigError(
                f"attack.size: a patch of {self.size} pixels does not fit into {shape[1]} x {shape[2]}; make"
                " it smaller"
            )
        if self.target >= samples.classes:
            raise ConfigError(
                f"attack.target: {samples.name} has classes 0 to {samples.classes - 1}, got {self.target}"
            )
        if len(self.colour) not in (1, shape[0]) or not all(0 <= c <= 1 for c in self.colour):
            raise ConfigError(f"attack.colour: needs 1 or {shape[0]} numbers from 0 to 1")

    def _patch(self, samples: Samples) -> Tensor:
        """[C, size, size] as images are stored: bytes, or numbers between the smallest and the largest of the
        dataset."""
        channels = samples.sample_shape[0]
        if self.pattern == "noise":
            shade = Key(0).fold("backdoor pattern").uniform(channels, self.size, self.size)
        else:
            shade = torch.tensor(self.colour).view(-1, 1, 1).expand(channels, self.size, self.size)
        if samples.x.dtype == torch.uint8:
            return (shade * 255).round().to(torch.uint8)
        low, high = float(samples.x.min()), float(samples.x.max())
        return low + shade * (high - low)
