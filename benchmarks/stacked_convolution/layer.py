"""A convolution of a client, and how kernels compute it. Works without Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Mode = Literal["float64", "tf32", "bf16"]
Kind = Literal["forward", "weights", "images"]
"""The results; the gradient of the weights; the gradient of the images."""


@dataclass(frozen=True)
class Shape:
    """A layer of one client: square images and kernels, stride 1."""

    batch: int
    inside: int
    side: int
    outside: int
    kernel: int
    padding: int = 0
    pooled: bool = False
    """Whether the layer ends with ReLU and pooling by 2."""
    samples: bool = False
    """Whether its images are samples: then nobody needs their gradient, and their channels are never
    innermost in memory."""

    @property
    def out(self) -> int:
        """The side of the convolution's result, before pooling."""
        return self.side + 2 * self.padding - self.kernel + 1

    @property
    def result(self) -> tuple[int, int, int, int]:
        """The layer's result of one client."""
        side = self.out // 2 if self.pooled else self.out
        return self.batch, self.outside, side, side

    @property
    def images(self) -> tuple[int, int, int, int]:
        return self.batch, self.inside, self.side, self.side

    @property
    def weight(self) -> tuple[int, int, int, int]:
        return self.outside, self.inside, self.kernel, self.kernel

    @property
    def patch(self) -> int:
        """How many numbers a patch has."""
        return self.inside * self.kernel**2

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return ("forward", "weights") if self.samples else ("forward", "weights", "images")

    def __str__(self) -> str:
        sides = f"{self.batch}x{self.inside}x{self.side}x{self.side}"
        return f"{sides:12} to {self.outside:2} by {self.kernel}+{self.padding} {'pooled' * self.pooled:6}"


class Blocks(NamedTuple):
    """What a program computes at a time: `channels` times `across` results (across: pixels or, for the
    gradient of the weights, numbers of a patch), adding `inner` products in each turn of its loop."""

    channels: int
    across: int
    inner: int
    warps: int = 4
    stages: int = 3
    turned: bool = False
    """Whether `across` is the first axis of the product: tensor cores of an H200 take 64 or more there."""
    splits: int = 1
    """Into how many parts the sum over pixels is split (gradient of the weights)."""

    def __str__(self) -> str:
        marks = f"{' turned' * self.turned}{f' in {self.splits} parts' if self.splits > 1 else ''}"
        return f"{self.channels}x{self.across}x{self.inner} {self.warps}w{self.stages}s{marks}"


@dataclass(frozen=True)
class Choice:
    """How the kernels compute a layer."""

    shape: Shape
    blocks: dict[Kind, Blocks]
    mode: Mode
    innermost: bool
    """Whether channels are innermost in memory: those of results, and of images that are not samples."""

    @property
    def reads_innermost(self) -> bool:
        return self.innermost and not self.shape.samples
