"""What may leave a client: updates clipped and noised, other fields withheld, sent or refused.

All fields of kind `update` of a reply together are clipped to length `clip`, and every number gets Gaussian
noise with deviation `noise * clip`. Two clients' clipped updates are at most 2 * clip apart, so for a server
that knows who took part, and may suppose any other data behind the update, the noise multiplier is noise / 2;
that is what is accounted, without any gain from sampling.

At level `sample`, updates leave as they are: training itself has clipped and noised the gradients
(holdfast/local/per_sample.py). In a pass over its data, each sample is in one batch, and another sample in
its place changes the sum of that batch by at most 2 * clip: so each pass is a release, with the multiplier
noise / 2."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from holdfast.core.device import to_device
from holdfast.core.errors import ConfigError, RunError
from holdfast.core.keys import Key
from holdfast.core.types import EVALUATE, UNDEFINED, Field, Schema
from holdfast.privacy.settings import PrivacySettings

Normal = Callable[[int], Tensor]
"""Draws so many standard normal numbers, in float64."""


class Protection:
    """The settings of [privacy] at work on replies."""

    def __init__(self, settings: PrivacySettings):
        self.settings = settings

    @property
    def multiplier(self) -> float:
        """Noise in units of the distance of two updates, or of the sums of two batches."""
        return self.settings.noise / 2

    def releases(self, schema: Schema) -> bool:
        """Whether a reply of this schema tells something that noise protects, and that is accounted."""
        return bool(updates(schema))

    def check(self, schema: Schema, task: str, norm_cap: float | None) -> None:
        """Raise an error, before any work is done, if no reply of this schema may leave."""
        size = 0 if self.settings.of_samples else sum(_size(schema[name]) for name in updates(schema))
        length = self.settings.clip * (1 + self.settings.noise * math.sqrt(size))
        if norm_cap is not None and length > norm_cap:
            raise ConfigError(
                f"privacy: an update with its noise is about {length:.0f} long and would be refused as a"
                f" fault; raise train.norm_cap (now {norm_cap:g}), or lower privacy.clip or privacy.noise"
            )
        bare = refused(schema, task) if self.settings.others == "withhold" else []
        if bare:
            raise ConfigError(
                f"privacy: '{bare[0]}' would be sent, and noise on updates does not protect it; choose a"
                ' method that sends updates only, or accept it with privacy.others = "send"'
            )

    def protect(
        self, fields: Mapping[str, Tensor], schema: Schema, task: str, normal: Normal
    ) -> dict[str, Tensor]:
        """Return one client's reply (one row of each tensor) as it may leave."""
        out = dict(fields)
        if self.settings.others == "withhold":
            for name, field in schema.items():
                instead = withheld(name, field, task, self.settings.count)
                if instead is not None:
                    out[name] = torch.full_like(fields[name], instead)
        names = [] if self.settings.of_samples else updates(schema)
        if names:
            out |= noised(
                {name: fields[name] for name in names}, self.settings.clip, self.settings.noise, normal
            )
        return out

    def unprotected(self, schema: Schema) -> list[str]:
        """Return the fields that are sent as they are."""
        return [] if self.settings.others == "withhold" else [n for n, field in schema.items() if bare(field)]


def noised(
    given: Mapping[str, Tensor], clip: float, noise: float, normal: Normal | None = None
) -> dict[str, Tensor]:
    """Return one client's update (one row of each tensor) clipped as a whole and then noised number by
    number."""
    flat = torch.cat([value.reshape(-1).double() for value in given.values()])
    length = float(flat.norm())
    if not math.isfinite(length):
        raise RunError("privacy: the update is not finite; nothing is sent")
    drawn = to_device((normal or secure_normal)(len(flat)), flat.device)  # drawn on the host, wherever it is
    flat = flat * min(1.0, clip / length if length else 1.0) + noise * clip * drawn
    parts = flat.split([value.numel() for value in given.values()])
    return {
        name: part.reshape(value.shape).to(value.dtype)
        for (name, value), part in zip(given.items(), parts, strict=True)
    }


def secure_normal(n: int) -> Tensor:
    """Return float64 [n], standard normal by Box and Muller, from the operating system's randomness alone."""
    pairs = (n + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), dtype="<u8").reshape(2, pairs) >> 11  # 53 bits each
    radius = np.sqrt(-2.0 * np.log((bits[0] + 1.0) * 2.0**-53))
    angle = 2.0 * np.pi * (bits[1] * 2.0**-53)
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:n])


def keyed_normal(key: Key) -> Normal:
    """The same from a key, for simulations, which are repeatable; whoever knows the key could subtract it."""
    return lambda n: key.normal(n, dtype=torch.float64)


def refused(schema: Schema, task: str) -> list[str]:
    """Return the fields that a reply would send unprotected: noise on updates does not cover them, and no
    constant can replace them."""
    return [name for name, field in schema.items() if bare(field) and withheld(name, field, task, 1) is None]


def updates(schema: Schema) -> list[str]:
    return [name for name, field in schema.items() if field.kind == "update" and _size(field)]


def bare(field: Field) -> bool:
    """Return whether noise on updates does not protect this field."""
    return field.kind != "update" and _size(field) > 0


def _size(field: Field) -> int:
    return math.prod(field.shape)


def withheld(name: str, field: Field, task: str, count: int) -> float | None:
    """Return a constant without information that every server half understands; None if there is none."""
    if field.kind == "update":
        return None
    if field.low == UNDEFINED:  # a figure that a client need not have
        return UNDEFINED
    if task == EVALUATE:  # a client without test samples
        return 0.0
    if field.kind == "scalar":
        return 0.0
    return float(count) if (name, field.kind, field.shape) == ("count", "count", ()) else None
