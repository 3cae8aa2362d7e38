"""Data that only the clients have: the experiment declares what a sample looks like, and every node brings
its own data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import torch

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import Part, register, setting
from holdfast.data.samples import Samples

_DTYPES = {"bytes": torch.uint8, "numbers": torch.float32, "words": torch.int32}


@register("source", "declared")
class Declared(Part):
    """A schema instead of samples: for federations whose nodes bring their own data. data.partition has no
    effect then.

    All clients must use the same format, so what other sources find in their files is declared here: the
    classes in their order, and the mean and deviation by which samples are normalised.
    """

    shape: tuple[int, ...] = setting(
        (), "shape of one sample: [1, 28, 28] for a grey image, [13] for a row of a table, [64] for 64 words"
    )
    classes: int = setting(0, "number of classes", ge=0)
    class_names: tuple[str, ...] = setting(
        (), "names of the classes in the order of their numbers; needed where labels are words"
    )
    samples: Literal["bytes", "numbers", "words"] = setting(
        "numbers", "type of a sample: bytes are images, words are texts"
    )
    column: str | None = setting(
        None, "column of the samples; default: image, x or text, depending on the type"
    )
    columns: tuple[str, ...] = setting(
        (), "columns of numbers that form a sample, in this order, instead of one column of lists"
    )
    label: str = setting("label", "column of the labels")
    mean: tuple[float, ...] = setting(
        (0.0,), "number to subtract: one, or one per channel; for bytes on the scale 0..1", min_length=1
    )
    std: tuple[float, ...] = setting((1.0,), "number to divide by after that", min_length=1)
    least: int = setting(1, "smallest number of training samples of a client", ge=1)
    most: int = setting(
        0,
        "largest number of samples for training, and for testing, that a client may have or report; required",
        ge=0,
    )

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.samples]

    def load(self, dir: Path | None) -> Samples:
        """Return no samples, but everything that a network is built from."""
        self.check()
        return self.of(torch.zeros(0, *self.shape, dtype=self.dtype), torch.zeros(0, dtype=torch.int64), 0)

    def of(self, x: torch.Tensor, y: torch.Tensor, train_rows: int) -> Samples:
        return Samples(
            x, y, self.classes, train_rows, self.mean, self.std, self.name, class_names=self.class_names
        )

    def check(self) -> None:
        """Check that the schema itself makes sense."""
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(
                f"data.options.shape: expected the sides of a sample, each 1 or more, not {list(self.shape)}"
            )
        if not self.classes:
            raise ConfigError("data.options.classes: set the number of classes")
        if self.class_names and len(set(self.class_names)) != self.classes:
            raise ConfigError(
                f"data.options.class_names: expected {self.classes} different names, not"
                f" {len(set(self.class_names))}"
            )
        if self.samples == "bytes" and (len(self.shape) != 3 or self.shape[0] not in (1, 3)):
            raise ConfigError(
                "data.options.shape: expected an image, [1, height, width] or [3, height, width], not"
                f" {list(self.shape)}"
            )
        if self.samples == "words" and len(self.shape) != 1:
            raise ConfigError(f"data.options.shape: expected a text, [words], not {list(self.shape)}")
        if self.columns and (self.samples != "numbers" or len(self.columns) != math.prod(self.shape)):
            raise ConfigError(
                f"data.options.columns: {len(self.columns)} columns do not form a sample of shape"
                f" {list(self.shape)}"
            )
        if not self.most:
            why = "it bounds the weight that a client can claim by a sample count that cannot be checked"
            raise ConfigError(
                f"data.options.most: set the largest number of samples that a client may have; {why}"
            )
        if self.least > self.most:
            raise ConfigError(f"data.options.least: {self.least} is more than most, {self.most}")

    def accept(self, found: Samples, where: str) -> Samples:
        """Check what a client brings against the declaration, and normalise it as declared."""
        if not len(found):
            raise DataError(f"{where}: there are no samples")
        if found.sample_shape != self.shape:
            raise DataError(
                f"{where}: samples have shape {list(found.sample_shape)}, but {list(self.shape)} is declared"
            )
        if found.x.dtype != self.dtype:
            raise DataError(
                f"{where}: samples are {_word(found.x.dtype)}, but {self.samples} ({_word(self.dtype)})"
                " are declared"
            )
        if found.class_names and self.class_names and found.class_names != self.class_names:
            raise DataError(
                f"{where}: class names or their order differ: found {', '.join(found.class_names)}; declared"
                f" {', '.join(self.class_names)}"
            )
        if not 0 <= int(found.y.min()) <= int(found.y.max()) < self.classes:
            raise DataError(
                f"{where}: labels are {int(found.y.min())}..{int(found.y.max())}, but"
                f" 0..{self.classes - 1} are declared"
            )
        if found.x.is_floating_point() and not bool(torch.isfinite(found.x).all()):
            row = int((~torch.isfinite(found.x)).flatten(1).any(1).int().argmax())
            raise DataError(f"{where}: sample {row} has a number that is not finite; remove it")
        return self.of(found.x, found.y, found.train_rows)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
