"""Data that only the clients have: the experiment says what a sample looks like, and every node brings its
own."""

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
    """A schema instead of samples: for federations whose nodes bring their own data. How data.partition deals
    does not matter then.

    Everybody must mean the same by a sample, so what other sources find in their files is said here: the
    classes in their order, and by which mean and deviation samples are normalised.

    """

    shape: tuple[int, ...] = setting(
        (), "of one sample: [1, 28, 28] for a grey image, [13] for a row of a table, [64] for 64 words"
    )
    classes: int = setting(0, "how many classes there are", ge=0)
    class_names: tuple[str, ...] = setting(
        (), "what they are called, in the order of their numbers; needed where labels are words"
    )
    samples: Literal["bytes", "numbers", "words"] = setting(
        "numbers", "what a sample is made of: bytes are images, words are texts"
    )
    column: str | None = setting(None, "column of the samples; else image, x or text, whichever a sample is")
    columns: tuple[str, ...] = setting(
        (), "columns of numbers that make a sample, in this order, instead of one column of lists"
    )
    label: str = setting("label", "column of the labels")
    mean: tuple[float, ...] = setting(
        (0.0,), "what is subtracted: one number, or one per channel, of bytes on 0..1", min_length=1
    )
    std: tuple[float, ...] = setting((1.0,), "what it is divided by then", min_length=1)
    least: int = setting(1, "training samples that a client must have", ge=1)
    most: int = setting(
        0,
        "samples for training, and for testing, that a client may have, and may say it has; must be stated",
        ge=0,
    )

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.samples]

    def load(self, dir: Path | None) -> Samples:
        """No samples, but all that a network is built from."""
        self.check()
        return self.of(torch.zeros(0, *self.shape, dtype=self.dtype), torch.zeros(0, dtype=torch.int64), 0)

    def of(self, x: torch.Tensor, y: torch.Tensor, train_rows: int) -> Samples:
        return Samples(
            x, y, self.classes, train_rows, self.mean, self.std, self.name, class_names=self.class_names
        )

    def check(self) -> None:
        """Whether the schema itself makes sense."""
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(
                f"data.options.shape: needs the sides of a sample, each 1 or more (got {list(self.shape)})"
            )
        if not self.classes:
            raise ConfigError("data.options.classes: say how many classes there are")
        if self.class_names and len(set(self.class_names)) != self.classes:
            raise ConfigError(
                f"data.options.class_names: needs {self.classes} different names (got"
                f" {len(set(self.class_names))})"
            )
        if self.samples == "bytes" and (len(self.shape) != 3 or self.shape[0] not in (1, 3)):
            raise ConfigError(
                "data.options.shape: an image is [1, height, width] or [3, height, width] (got"
                f" {list(self.shape)})"
            )
        if self.samples == "words" and len(self.shape) != 1:
            raise ConfigError(f"data.options.shape: a text is [words] (got {list(self.shape)})")
        if self.columns and (self.samples != "numbers" or len(self.columns) != math.prod(self.shape)):
            raise ConfigError(
                f"data.options.columns: {len(self.columns)} columns do not make a sample of shape"
                f" {list(self.shape)}"
            )
        if not self.most:
            why = "it bounds the weight that a client can claim, by a count that nobody can check"
            raise ConfigError(
                f"data.options.most: say in the experiment how many samples a client has at most; {why}"
            )
        if self.least > self.most:
            raise ConfigError(f"data.options.least: {self.least} is more than most, {self.most}")

    def accept(self, found: Samples, where: str) -> Samples:
        """What a client brings, if it is what was declared; normalised as was declared."""
        if not len(found):
            raise DataError(f"{where}: there are no samples")
        if found.sample_shape != self.shape:
            raise DataError(
                f"{where}: samples have shape {list(found.sample_shape)}, declared is {list(self.shape)}"
            )
        if found.x.dtype != self.dtype:
            raise DataError(
                f"{where}: samples are {_word(found.x.dtype)}, declared are {self.samples}"
                f" ({_word(self.dtype)})"
            )
        if found.class_names and self.class_names and found.class_names != self.class_names:
            raise DataError(
                f"{where}: another label map: {', '.join(found.class_names)}, declared"
                f" {', '.join(self.class_names)}"
            )
        if not 0 <= int(found.y.min()) <= int(found.y.max()) < self.classes:
            raise DataError(
                f"{where}: labels are {int(found.y.min())}..{int(found.y.max())}, declared are"
                f" 0..{self.classes - 1}"
            )
        if found.x.is_floating_point() and not bool(torch.isfinite(found.x).all()):
            row = int((~torch.isfinite(found.x)).flatten(1).any(1).int().argmax())
            raise DataError(f"{where}: sample {row} has a number that is not finite")
        return self.of(found.x, found.y, found.train_rows)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
