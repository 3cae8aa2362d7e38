"""Bars in an image, as in the distributed backdoor attack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.attacks.triggers.base import Change, DataKind, Stamp
from holdfast.attacks.triggers.patch import shaded
from holdfast.core.errors import ConfigError
from holdfast.core.registry import register, setting
from holdfast.data.samples import Samples


@register("trigger", "bars", paper="Xie, Huang, Chen and Li: DBA, ICLR 2020")
class Bars(Stamp):
    """Four bright bars, one pixel high, two above two, near the upper left corner of an image (DBA, Sec. 3.3:
    trigger size, gap and location).

    DBA takes `width = 4, gap = 2` for MNIST and `width = 6, gap = 3` for CIFAR-10, at `shift = 0`. Its gap
    lies between two bars of a row and between the two rows alike."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "for": "images",
        "what it changes": "four bars, two above two, in the upper left",
        "settings, with their defaults": "`width`: a seventh of the image; `gap`: half of that; `shift = 0`",
    }
    fits: ClassVar[frozenset[DataKind]] = frozenset({"image"})
    width: int | None = setting(
        None, "pixels of a bar; none: a seventh of the image's width, at least 1", ge=1
    )
    gap: int | None = setting(None, "pixels between bars; none: half of their width, at least 1", ge=1)
    shift: int = setting(0, "pixels from the upper left corner, down and to the right", ge=0)

    def change(self, samples: Samples) -> Change:
        _, height, width = samples.sample_shape
        bar = max(1, width // 7) if self.width is None else self.width
        gap = max(1, bar // 2) if self.gap is None else self.gap
        if self.shift + 2 * bar + gap > width or self.shift + gap + 2 > height:
            raise ConfigError(
                f"attack.trigger: bars of {bar} pixels with a gap of {gap} do not fit into"
                f" {height} x {width}; make width, gap or shift smaller"
            )
        mask = torch.zeros(height, width, dtype=torch.bool)
        for row in (self.shift, self.shift + gap + 1):
            for column in (self.shift, self.shift + bar + gap):
                mask[row, column : column + bar] = True
        white = shaded(torch.ones(()), samples)

        def stamp(x: Tensor) -> Tensor:
            return torch.where(mask, white.to(x.dtype), x)

        return stamp
