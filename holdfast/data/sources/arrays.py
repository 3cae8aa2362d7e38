"""Data that was handed over in Python."""

from __future__ import annotations

from pathlib import Path

from pydantic import InstanceOf

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import register, setting
from holdfast.data.handed.content import HandedOver
from holdfast.data.samples import Samples
from holdfast.data.sources.base import Source


@register("source", "arrays")
class Arrays(Source):
    """Arrays, tensors, datasets or data frames that were handed over in Python, as in
    holdfast.run(data=[(X0, y0), (X1, y1)]) or holdfast.Data(X, y).

    A run directory names them by their digest and holds a copy, if they are not larger than the limit
    (holdfast.Data(..., keep="2GB")). Licence: that of your data.
    """

    samples: str | InstanceOf[HandedOver] | None = setting(
        None, "the samples; in a run directory their SHA-256 digest"
    )
    shift: tuple[float, ...] | None = setting(
        None, "number to subtract instead of the mean: one, or one per channel; for bytes on the scale 0..1"
    )
    scale: tuple[float, ...] | None = setting(
        None, "number to divide by after that, instead of the deviation"
    )

    def load(self, dir: Path | None) -> Samples:
        if not isinstance(self.samples, HandedOver):
            which = f" (digest {self.samples[:12]})" if self.samples else ""
            raise DataError(
                f'data.name = "arrays" is data that is handed over in Python{which}; pass it as'
                " holdfast.run(data=...)"
            )
        content = self.samples.content()
        self._check(content.kind)
        mean = content.mean if self.shift is None else self.shift
        std = content.std if self.scale is None else self.scale
        return self._samples(
            content.x,
            content.y,
            content.classes,
            content.train_rows,
            mean,
            std,
            content.user,
            content.class_names,
        )

    def _check(self, kind: str) -> None:
        given = self.shift is not None or self.scale is not None
        if given and self.normalise != "dataset":
            raise ConfigError(
                "data.options: shift and scale take the place of the dataset's mean and deviation; leave"
                f' normalise out, which is "{self.normalise}"'
            )
        if kind in ("words", "table") and (given or self.normalise != "dataset"):
            why = (
                "words are looked up, not computed with" if kind == "words" else "each column is standardised"
            )
            raise ConfigError(f"data.options.normalise: leave it out; {why}")
