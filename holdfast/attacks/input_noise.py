"""Noise on training inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.attacks.base import Attack
from holdfast.attacks.data_poisoning import chosen, owner_keys, with_inputs
from holdfast.core.columns import Reads
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.data.federation import Federation


@register("attack", "input-noise")
class InputNoise(Attack):
    """Trains on inputs with Gaussian noise; labels stay true (C-PFL's noisy clients, sigma 0.1, 0.2 and 0.3).

    There, other clients are noisy every round: `redraw = true`. Whether the noise comes before or after
    normalising is not said; here it is in pixels on the scale 0..1 (for other numbers, on their own scale),
    or with `scale = "normalised"` in units of what the model sees. Images are bytes, so they stay between
    black and white; each sample's noise is drawn once."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "trains on noisy inputs, labels kept; not for texts",
        "settings, with their defaults": '`sigma = 0.1`, `scale = "raw"`, `ratio = 1`',
    }
    kinds: ClassVar[frozenset[str]] = frozenset()
    reads: ClassVar[Reads] = "sum"  # sends what it trained
    sigma: float = setting(0.1, "standard deviation of the noise", ge=0)
    scale: Literal["raw", "normalised"] = setting(
        "raw", "sigma in pixels from 0 to 1 (or a column's own unit), or as the model sees it"
    )
    ratio: float = setting(1.0, "share of an attacker's samples that are affected", ge=0, le=1)

    def data(self, federation: Federation, malicious: Tensor, key: Key) -> Federation:
        samples = federation.samples
        if samples.words:
            raise ConfigError(
                f"attack 'input-noise' adds numbers to inputs, but {samples.name} is text; use label-flip"
            )
        places = chosen(federation.train, malicious, self.ratio, key)
        noise = self.sigma * owner_keys(federation.train, places, key.fold("noise")).normal(
            *samples.sample_shape
        )
        if self.scale == "normalised":
            noise = noise * torch.tensor(samples.std).view(-1, *[1] * (len(samples.sample_shape) - 1))

        def noisy(x: Tensor) -> Tensor:
            if x.dtype != torch.uint8:
                return x + noise
            return (x + 255.0 * noise).round().clamp(0, 255).to(torch.uint8)

        return with_inputs(federation, places, noisy)
