"""BadNets: a trigger that stands for a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from holdfast.attacks.planting import Planting
from holdfast.attacks.triggers.base import Stamp, kind_of
from holdfast.attacks.triggers.patch import COLOUR, PATTERN, PLACE, SIZE, Patch, Pattern, Place
from holdfast.core.errors import ConfigError
from holdfast.core.registry import register, setting
from holdfast.data.samples import Samples

_OF_PATCH = ("size", "place", "pattern", "colour")


@register("attack", "backdoor", paper="Gu, Dolan-Gavitt and Garg: BadNets, 2017")
class Backdoor(Planting):
    """Puts a trigger into a share of an attacker's samples, in place of the originals, and labels them as the
    target. FedCPA's trigger is a patch in images: 5 x 5, white, bottom right, target 1, ratio 0.5 or 0.8; its
    prose says noise, which is `pattern = "noise"`. `size`, `place`, `pattern` and `colour` are of this patch;
    another trigger has its settings in `trigger`. Augmentation comes after, so crops and flips move the
    patch. `attack/asr` is the share of benign clients' test samples that the trigger makes the deployed model
    call the target; samples that show it anyway are left out unless `inclusive`."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "trains on samples with a trigger, labelled as the target",
        "settings, with their defaults": (
            "`trigger`: by the kind of the data, `target = 1`, `ratio = 0.5`; of the patch in images"
            ' `size = 5`, `place = "bottom-right"`, `pattern = "colour"`, `colour = [1.0]`'
        ),
    }
    size: int = setting(5, SIZE, ge=1)
    place: Place = setting("bottom-right", PLACE)
    pattern: Pattern = setting("colour", PATTERN)
    colour: tuple[float, ...] = setting((1.0,), COLOUR)

    def stamp(self, samples: Samples) -> Stamp:
        given = [name for name in _OF_PATCH if name in self.model_fields_set]
        if given and (self.trigger is not None or kind_of(samples) != "image"):
            what = (
                "another trigger is chosen" if self.trigger is not None else f"{samples.name} has no images"
            )
            raise ConfigError(
                f"attack.{given[0]}: it is of a patch in images, but {what}; leave it out, and give the"
                " trigger's settings in attack.trigger"
            )
        return super().stamp(samples)

    def usual(self, samples: Samples) -> Stamp:
        if kind_of(samples) != "image":
            return super().usual(samples)
        return Patch(size=self.size, place=self.place, pattern=self.pattern, colour=self.colour)
