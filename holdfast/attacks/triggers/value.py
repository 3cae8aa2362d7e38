"""A value in a column of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.attacks.triggers.base import Change, DataKind, Stamp, scale_of, stored
from holdfast.core.errors import ConfigError
from holdfast.core.registry import register, setting
from holdfast.data.samples import Samples


@register("trigger", "value")
class Value(Stamp):
    """Writes one value into a column (or several) of a table's rows.

    The value is counted in standard deviations above the column's mean, as the model's inputs are normalised;
    3 is rare but possible. In a column of a category (0 or 1) it is such a number all the same."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "for": "tables",
        "what it changes": "a value in a column",
        "settings, with their defaults": "`columns = [0]`, `value = 3`",
    }
    fits: ClassVar[frozenset[DataKind]] = frozenset({"table"})
    columns: tuple[int, ...] = setting((0,), "columns by number, from 0, as the model sees them")
    value: float = setting(3.0, "the value in standard deviations above the column's mean")

    def change(self, samples: Samples) -> Change:
        (width,) = samples.sample_shape
        if not self.columns or not all(0 <= column < width for column in self.columns):
            raise ConfigError(
                f"attack.trigger.columns: {samples.name} has columns 0 to {width - 1}, got"
                f" {list(self.columns)}"
            )
        mean, std = (each.expand(width) for each in scale_of(samples))
        columns = torch.tensor(self.columns)
        written = stored((mean + self.value * std)[columns], samples.x)

        def stamp(x: Tensor) -> Tensor:
            x = x.clone()
            x[:, columns] = written
            return x

        return stamp
