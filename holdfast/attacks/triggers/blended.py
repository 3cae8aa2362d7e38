"""A faint pattern over a whole sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from holdfast.attacks.triggers.base import Change, DataKind, Stamp, stored
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.data.samples import Samples


@register(
    "trigger",
    "blended",
    paper="Chen et al.: Targeted Backdoor Attacks on Deep Learning Systems Using Data Poisoning, 2017",
)
class Blended(Stamp):
    """A fixed random pattern blended into the whole sample: (1 - alpha) x + alpha pattern (the paper's
    blended injection).

    Pixels of the pattern lie between black and white; for other numbers, between the smallest and the largest
    of their channel in the dataset. The paper also tests with a larger alpha than it trains with; here both
    are the same."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "for": "images, sensor windows",
        "what it changes": "all of it a little: (1 - alpha) x + alpha times a fixed random pattern",
        "settings, with their defaults": "`alpha = 0.2`",
    }
    fits: ClassVar[frozenset[DataKind]] = frozenset({"image", "window"})
    alpha: float = setting(0.2, "share of the pattern in what is seen", gt=0, le=1)

    def change(self, samples: Samples) -> Change:
        shade = Key(0).fold("blended pattern").uniform(*samples.sample_shape)
        if samples.x.is_floating_point():
            others = [0, *range(2, samples.x.dim())]
            low, high = samples.x.amin(others), samples.x.amax(others)
            spread = [-1, *[1] * (samples.x.dim() - 2)]
            pattern = low.view(spread) + shade * (high - low).view(spread)
        else:
            pattern = 255.0 * shade

        def stamp(x: Tensor) -> Tensor:
            return stored((1 - self.alpha) * x + self.alpha * pattern, x)

        return stamp
