"""What all backdoor attacks share: a trigger, the class that it stands for, and how its success is
counted."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import InstanceOf, field_validator
from torch import Tensor

from holdfast.attacks.base import Attack, Trigger
from holdfast.attacks.data_poisoning import chosen, with_inputs
from holdfast.attacks.triggers.base import DataKind, Stamp, kind_of
from holdfast.core.columns import Reads
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import build, setting
from holdfast.data.federation import Federation, Samples

USUAL: dict[DataKind, str] = {
    "image": "patch",
    "window": "disturbance",
    "text": "word",
    "table": "value",
}
"""The trigger by the kind of the data, where none is named."""


class Planting(Attack):
    """Base class of backdoor attacks: a share of each attacker's samples gets the trigger, in place of the
    originals, and the target's label."""

    kinds: ClassVar[frozenset[str]] = frozenset()
    reads: ClassVar[Reads] = "sum"  # sends what it trained
    trigger: str | dict[str, Any] | InstanceOf[Stamp] | None = setting(
        None,
        "`holdfast list triggers`: a name or a table; none: patch for images, disturbance for sensor windows,"
        " word for texts, value for tables",
    )
    target: int = setting(1, "the class that the trigger stands for", ge=0)
    ratio: float = setting(0.5, "share of an attacker's samples that are replaced", ge=0, le=1)
    inclusive: bool = setting(False, "count samples of the target class in attack/asr, as FedCPA's code does")

    @field_validator("trigger")
    @classmethod
    def _known(cls, trigger: Any) -> Any:
        """A misspelt trigger is an error before the data is loaded."""
        if trigger is not None:
            build("trigger", trigger, "attack.trigger")
        return trigger

    def stamp(self, samples: Samples) -> Stamp:
        """The trigger that was chosen, or the usual one for such data."""
        return self.usual(samples) if self.trigger is None else chosen_stamp(self.name, self.trigger, samples)

    def usual(self, samples: Samples) -> Stamp:
        """The trigger for such data where none is chosen."""
        return chosen_stamp(self.name, None, samples)

    def data(self, federation: Federation, malicious: Tensor, key: Key) -> Federation:
        planted = self.planted(federation.samples)
        places = chosen(federation.train, malicious, self.ratio, key)
        return with_inputs(federation, places, planted.stamp, torch.full_like(places, self.target))

    def planted(self, samples: Samples) -> Trigger:
        check_class(self.target, "target", samples)
        return Trigger(self.stamp(samples).on(samples), self.target, self.inclusive)


def check_class(number: int, setting: str, samples: Samples) -> None:
    """Refuse a class that the data does not have."""
    if number >= samples.classes:
        raise ConfigError(
            f"attack.{setting}: {samples.name} has classes 0 to {samples.classes - 1}, got {number}"
        )


def chosen_stamp(attack: str, trigger: Any, samples: Samples) -> Stamp:
    """The trigger that was chosen, or the usual one for such data."""
    if trigger is not None:
        return build("trigger", trigger, "attack.trigger")
    kind = kind_of(samples)
    if kind not in USUAL:
        raise ConfigError(
            f"attack '{attack}': samples of shape {list(samples.sample_shape)} are no images, windows,"
            " texts or tables, so no trigger is known for them; use label-flip"
        )
    return build("trigger", USUAL[kind])
