"""For which layers kernels are faster than matrix products of patches, and with which blocks. This is a
table of what was measured, never a trial: bits must not depend on a stopwatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .shape import Blocks, Kind, Shape

_SMALLEST, _LARGEST = 16, 64  # channels of a block: tensor cores take no fewer; more do not fit registers
_FEW_TILES, _SPLITS = 4, 5  # a client whose weights are so few tiles has its sums split into parts


class Measured(NamedTuple):
    """A layer for which kernels were found faster, for batches of `shape.batch` to `most` samples."""

    shape: Shape
    most: int
    blocks: Mapping[Kind, Blocks]


# H200, PyTorch 2.11, Triton 3.6, 2026-11-19: python benchmarks/convolution_kernel.py --precisions tf32, and
# --parts shapes --precisions tf32; behind a name the smaller ratio of 960 and 100 clients. The second layer
# of cnn-512 for 28 x 28 was 1.23 times as fast, which is not enough.
MEASURED = (
    Measured(
        Shape(10, 3, 32, 32, 5, samples=True),
        64,
        {"forward": Blocks(32, 128, 16, stages=1), "weights": Blocks(32, 128, 32, stages=1, splits=5)},
    ),
    Measured(
        Shape(10, 32, 14, 64, 5),
        64,
        {
            "forward": Blocks(64, 128, 32),
            "weights": Blocks(64, 128, 32, turned=True),
            "images": Blocks(32, 256, 32, warps=8, turned=True),
        },
    ),
    Measured(  # fedcap-cnn 28 first: 3.04x
        Shape(10, 1, 28, 16, 5, samples=True),
        10,
        {
            "forward": Blocks(16, 128, 16, stages=1),
            "weights": Blocks(16, 128, 32, stages=1, splits=5),
        },
    ),
    Measured(  # fedcap-cnn 28 second: 1.59x
        Shape(10, 16, 12, 32, 5),
        10,
        {
            "forward": Blocks(32, 128, 32),
            "images": Blocks(16, 256, 32, warps=8, turned=True),
            "weights": Blocks(32, 128, 32, stages=1, turned=True),
        },
    ),
    Measured(  # cnn-bn 32 first: 2.71x
        Shape(10, 3, 32, 16, 3, 1, samples=True),
        10,
        {
            "forward": Blocks(16, 128, 16),
            "weights": Blocks(16, 128, 32, stages=1, splits=5),
        },
    ),
    Measured(  # cnn-bn 32 second: 2.35x
        Shape(10, 16, 16, 32, 3, 1),
        10,
        {
            "forward": Blocks(32, 128, 32),
            "images": Blocks(16, 256, 32, warps=8, turned=True),
            "weights": Blocks(32, 128, 32, stages=1, turned=True, splits=5),
        },
    ),
    Measured(  # cnn-512 28 first: 2.03x
        Shape(10, 1, 28, 32, 5, samples=True),
        10,
        {
            "forward": Blocks(32, 128, 16, stages=1),
            "weights": Blocks(32, 128, 32, stages=1, splits=5),
        },
    ),
    Measured(  # lenet 28 first: 1.81x
        Shape(10, 1, 28, 6, 5, 2, samples=True),
        10,
        {
            "forward": Blocks(16, 128, 16, stages=1),
            "weights": Blocks(16, 128, 32, stages=1, splits=5),
        },
    ),
    Measured(  # lenet 28 second: 1.42x
        Shape(10, 6, 14, 16, 5),
        10,
        {
            "forward": Blocks(16, 128, 32),
            "images": Blocks(16, 256, 32, warps=8, turned=True),
            "weights": Blocks(16, 128, 32, stages=1, turned=True, splits=5),
        },
    ),
    Measured(  # lenet 32 first: 2.55x
        Shape(10, 3, 32, 6, 5, samples=True),
        10,
        {
            "forward": Blocks(16, 128, 16, stages=1),
            "weights": Blocks(16, 128, 32, stages=1, splits=5),
        },
    ),
    Measured(  # cnn-bn 28 first: 2.58x
        Shape(10, 1, 28, 16, 3, 1, samples=True),
        10,
        {
            "forward": Blocks(16, 128, 16, stages=1),
            "weights": Blocks(16, 128, 32, stages=1, splits=5),
        },
    ),
    Measured(  # cnn-bn 28 second: 2.16x
        Shape(10, 16, 14, 32, 3, 1),
        10,
        {
            "forward": Blocks(32, 128, 32),
            "images": Blocks(16, 256, 32, warps=8, turned=True),
            "weights": Blocks(32, 128, 32, stages=1, turned=True, splits=5),
        },
    ),
)
"""The first two are FedCAP's network for images of 3 x 32 x 32, whose convolutions `cnn-512` has too; they
were measured for batches of 10 and 64, the others for 10."""


def measured(shape: Shape) -> Mapping[Kind, Blocks] | None:
    """Return the blocks of a layer; None where kernels were not found faster."""
    for entry in MEASURED:
        if entry.shape == shape._replace(batch=entry.shape.batch) and (
            entry.shape.batch <= shape.batch <= entry.most
        ):
            return entry.blocks
    return None


def rule(shape: Shape) -> dict[Kind, Blocks]:
    """Return the blocks with which a layer that is not in the table is worth measuring. Where images have
    their channels outermost, loads of several turns at a time are up to 12 times slower than those of one;
    where they are innermost, gradients are up to twice as fast with the product turned."""
    few = shape.samples
    results, images = _block_of(shape.outside), _block_of(shape.inside)
    tiles = -(-(shape.patch + 1) // 128)
    splits = _SPLITS if tiles < _FEW_TILES else 1
    found: dict[Kind, Blocks] = {
        "forward": Blocks(results, 128, 16, stages=1) if few else Blocks(results, 128, 32),
        "weights": Blocks(results, 128, 32, stages=1 if few else 3, turned=not few, splits=splits),
        "images": Blocks(images, 256, 32, warps=8, turned=True),
    }
    return {kind: found[kind] for kind in shape.kinds}


def _block_of(channels: int) -> int:
    """Return the power of two that holds so many channels, within bounds."""
    return max(_SMALLEST, min(_LARGEST, 1 << (channels - 1).bit_length()))
