"""A convolution of a client, and how kernels compute it. Works without Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Mode = Literal["float64", "tf32", "bf16"]
Kind = Literal["forward", "weights", "images"]
"""The results; the gradient of the weights; the gradient of the images."""
KINDS: tuple[Kind, ...] = ("forward", "weights", "images")


class Shape(NamedTuple):
    """A layer of one client: square images and kernels, stride 1."""

    batch: int
    inside: int
    side: int
    outside: int
    kernel: int
    padding: int = 0
    samples: bool = False
    """Whether nobody needs the gradient of its images, as of samples. Their channels are then not innermost
    in memory."""

    @property
    def out(self) -> int:
        """The side of the result."""
        return self.side + 2 * self.padding - self.kernel + 1

    @property
    def result(self) -> tuple[int, int, int, int]:
        """The layer's result of one client, whose channels are innermost in memory."""
        return self.batch, self.outside, self.out, self.out

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
        return KINDS[:2] if self.samples else KINDS

    def __str__(self) -> str:
        sides = f"{self.batch}x{self.inside}x{self.side}x{self.side}"
        return f"{sides:12} to {self.outside:2} by {self.kernel}+{self.padding}"


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

    @property
    def shared(self) -> int:
        """The most bytes of a multiprocessor's memory that a program needs: for the factors of the products
        that are under way, or to write results down in another order."""
        factors = (self.channels + self.across) * self.inner * self.stages
        return 4 * max(factors, self.channels * self.across)

    def __str__(self) -> str:
        marks = f"{' turned' * self.turned}{f' in {self.splits} parts' if self.splits > 1 else ''}"
        return f"{self.channels}x{self.across}x{self.inner} {self.warps}w{self.stages}s{marks}"


@dataclass(frozen=True)
class Choice:
    """How the kernels compute a layer."""

    shape: Shape
    blocks: Mapping[Kind, Blocks]
    mode: Mode

    def numbers(self) -> tuple[list[int], list[int]]:
        """The layer and all blocks as an operation is given them."""
        blocks = [int(each) for kind in self.shape.kinds for each in self.blocks[kind]]
        return [int(each) for each in self.shape], blocks

    @classmethod
    def of_numbers(cls, layer: Sequence[int], blocks: Sequence[int], mode: Mode) -> Choice:
        shape, size = Shape._make([*layer[:-1], bool(layer[-1])]), len(Blocks._fields)
        parts = [blocks[start : start + size] for start in range(0, len(blocks), size)]
        each = [Blocks._make([*sizes, bool(turned), splits]) for *sizes, turned, splits in parts]
        return cls(shape, dict(zip(shape.kinds, each, strict=True)), mode)
