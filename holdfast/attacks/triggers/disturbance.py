"""A disturbance of some channels of a sensor window over some steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.attacks.triggers.base import Change, DataKind, Stamp, scale_of, stored
from holdfast.core.errors import ConfigError
from holdfast.core.registry import register, setting
from holdfast.data.samples import Samples


@register("trigger", "disturbance")
class Disturbance(Stamp):
    """Adds a step, or one period of a sine wave, to some channels of a sensor window over some of its steps.

    Its height is counted in standard deviations of each channel, as the model's inputs are normalised; where
    they are not normalised, in the sensor's own unit."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "for": "sensor windows",
        "what it changes": "some channels over some steps: a step or a wave is added",
        "settings, with their defaults": (
            "`channels`: all, `first`: so that it ends with the window, `steps`: an eighth of the window,"
            ' `height = 3`, `wave = "step"`'
        ),
    }
    fits: ClassVar[frozenset[DataKind]] = frozenset({"window"})
    channels: tuple[int, ...] | None = setting(None, "channels by number, from 0; none: all")
    first: int | None = setting(
        None, "first disturbed step, from 0; none: so that the disturbance ends with the window", ge=0
    )
    steps: int | None = setting(
        None, "length of the disturbance; none: an eighth of the window, at least 1", ge=1
    )
    height: float = setting(3.0, "height of the disturbance in standard deviations of a channel")
    wave: Literal["step", "sine"] = setting("step", "one height throughout, or one period of a sine wave")

    def change(self, samples: Samples) -> Change:
        channels, length = samples.sample_shape
        chosen = list(range(channels)) if self.channels is None else list(self.channels)
        steps = max(1, length // 8) if self.steps is None else self.steps
        first = length - steps if self.first is None else self.first
        if not chosen or not all(0 <= channel < channels for channel in chosen):
            raise ConfigError(
                f"attack.trigger.channels: {samples.name} has channels 0 to {channels - 1}, got {chosen}"
            )
        if first < 0 or first + steps > length:
            raise ConfigError(
                f"attack.trigger.steps: {steps} steps from step {first} on do not fit into a window of"
                f" {length}"
            )
        time = torch.arange(steps, dtype=torch.float64)
        shape = torch.ones(steps).double() if self.wave == "step" else (2 * math.pi * time / steps).sin()
        scale = scale_of(samples)[1].expand(channels)
        added = torch.zeros(channels, length, dtype=torch.float64)
        added[chosen, first : first + steps] = self.height * scale[chosen, None] * shape

        def stamp(x: Tensor) -> Tensor:
            return stored(x + added, x)

        return stamp
