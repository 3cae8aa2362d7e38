"""What is measured on which device, and the block sizes that are tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.bench.steps import WORKS, Work
from holdfast.core.device import Precision
from holdfast.models.stacked_convolution.blocks import measured
from holdfast.models.stacked_convolution.shape import Blocks, Choice, Kind, Mode, Shape

FEDCAP = {"first": Shape(10, 3, 32, 32, 5, samples=True), "second": Shape(10, 32, 14, 64, 5)}
"""The convolutions of FedCAP's CIFAR-10 network for a batch of one client."""
TINY = {"first": Shape(2, 1, 12, 4, 5, samples=True), "second": Shape(2, 4, 4, 8, 3, 1)}
"""In their place for the interpreter."""
TRIED: dict[tuple[str, Kind], tuple[Blocks, ...]] = {
    ("first", "forward"): (
        Blocks(32, 256, 16, warps=8, stages=1),
        Blocks(32, 256, 16, stages=1),
        Blocks(32, 128, 16, warps=8, stages=1),
        Blocks(32, 128, 16, stages=1, turned=True),
        Blocks(32, 128, 32, stages=1),
        Blocks(32, 64, 16, stages=1),
    ),
    ("first", "weights"): (
        Blocks(32, 128, 32, stages=1, splits=2),
        Blocks(32, 128, 32, stages=1, splits=10),
        Blocks(32, 128, 32, stages=1, splits=5, turned=True),
        Blocks(32, 128, 64, stages=1, splits=5),
        Blocks(32, 128, 16, stages=1, splits=5),
        Blocks(32, 128, 32, warps=8, stages=1, splits=5),
    ),
    ("second", "forward"): (
        Blocks(64, 128, 32, stages=2),
        Blocks(64, 128, 32, stages=4),
        Blocks(64, 128, 32, warps=8),
        Blocks(64, 256, 32, warps=8),
    ),
    ("second", "weights"): (
        Blocks(64, 128, 32, warps=8, turned=True),
        Blocks(64, 128, 32, turned=True, splits=2),
        Blocks(64, 128, 64, turned=True),
        Blocks(64, 128, 64, warps=8, turned=True),
        Blocks(64, 128, 32, stages=1, turned=True),
        Blocks(64, 128, 32, stages=2, turned=True),
        Blocks(64, 256, 32, warps=8, turned=True),
        Blocks(64, 128, 32, warps=8, turned=True, splits=2),
        Blocks(64, 64, 32, turned=True),
    ),
    ("second", "images"): (
        Blocks(32, 128, 32, turned=True),
        Blocks(32, 128, 32, warps=8, turned=True),
        Blocks(32, 256, 32, warps=8, stages=2, turned=True),
        Blocks(32, 256, 32, warps=8, stages=1, turned=True),
        Blocks(32, 256, 64, warps=8, stages=2, turned=True),
        Blocks(32, 256, 16, warps=8, turned=True),
        Blocks(32, 256, 16, warps=8, stages=4, turned=True),
        Blocks(32, 64, 64, turned=True),
    ),
}
"""Beside those of the package's table. What was tried before is in docs/performance.md."""
SLOW = Blocks(16, 16, 16, splits=2)  # for float64, which needs no tensor cores, and for small shapes
SMALL = (Shape(2, 3, 6, 4, 3, 1), Shape(2, 2, 8, 5, 5), Shape(2, 2, 8, 5, 5, samples=True))
_ON_A_CPU = Blocks(16, 128, 32)


def _stacked(model: str, shapes: tuple[Shape, Shape]) -> dict[str, Shape]:
    return {f"{model} {place}": shape for place, shape in zip(("first", "second"), shapes, strict=True)}


NETWORKS = (
    {f"fedcap-cnn 32 {place}, 64": shape._replace(batch=64) for place, shape in FEDCAP.items()}
    | _stacked("fedcap-cnn 28", (Shape(10, 1, 28, 16, 5, samples=True), Shape(10, 16, 12, 32, 5)))
    | _stacked("cnn-bn 32", (Shape(10, 3, 32, 16, 3, 1, samples=True), Shape(10, 16, 16, 32, 3, 1)))
    | _stacked("cnn-512 28", (Shape(10, 1, 28, 32, 5, samples=True), Shape(10, 32, 12, 64, 5)))
    | _stacked("lenet 28", (Shape(10, 1, 28, 6, 5, 2, samples=True), Shape(10, 6, 14, 16, 5)))
    | {"lenet 32 first": Shape(10, 3, 32, 6, 5, samples=True)}
    | _stacked("cnn-bn 28", (Shape(10, 1, 28, 16, 3, 1, samples=True), Shape(10, 16, 14, 32, 3, 1)))
)
"""The convolutions of other networks that Holdfast stacks, for a batch of 10, and FedCAP's for one of 64. The
second layer of `lenet` for 32 x 32 is that for 28 x 28, and `cnn-512` has FedCAP's for 32 x 32."""


@dataclass(frozen=True)
class Setting:
    """What runs on a device: everything on a GPU, tiny shapes by an interpreter on a CPU."""

    device: str
    shapes: dict[str, Shape]
    tried: dict[tuple[str, Kind], tuple[Blocks, ...]]
    networks: dict[str, Shape]
    clients: tuple[int, ...]
    clients_of_networks: tuple[int, ...]
    precisions: tuple[Mode, ...]
    precisions_of_steps: tuple[Precision, ...]
    works: tuple[Work, ...]
    turns: int
    seconds: float
    """How long each form runs in a turn, about."""

    @classmethod
    def of(cls, device: str) -> Setting:
        half: tuple[Precision, ...] = ("tf32", "bf16", "bf16-activations")
        if device != "cpu":
            works = {work.name: work for work in WORKS}
            steps = works["cifar-48x20"], works["cifar-20"]
            tried = {
                (layer, kind): (_in_table(FEDCAP[layer])[kind], *more)
                for (layer, kind), more in TRIED.items()
            }
            counts, modes = ((960, 20), (960, 100)), ("tf32", "bf16")
            return cls(device, FEDCAP, tried, NETWORKS, *counts, modes, half, steps, 7, 0.03)
        tried = {key: (_ON_A_CPU, _ON_A_CPU._replace(turned=True)) for key in TRIED}
        images = {"name": "synthetic", "shape": (1, 28, 28)}
        work = Work("tiny", {"name": "fedcap-cnn"}, images, clients=2, samples=2, batch_size=2)
        return cls(device, TINY, tried, TINY, (2,), (2,), ("tf32",), half, (work,), 1, 0.0)

    def only(self, precisions: list[Precision] | None, works: list[str] | None) -> Setting:
        """The same for some precisions and works; none: for all."""
        asked = precisions or self.precisions_of_steps
        return replace(
            self,
            precisions=tuple(mode for mode in self.precisions if mode in asked),
            precisions_of_steps=tuple(each for each in self.precisions_of_steps if each in asked),
            works=tuple(work for work in self.works if not works or work.name in works),
        )

    def choice(self, shape: Shape, mode: Mode) -> Choice:
        """How the package computes a layer; on a CPU, where it does not, with blocks for any layer."""
        blocks = dict.fromkeys(shape.kinds, _ON_A_CPU) if self.device == "cpu" else _in_table(shape)
        return Choice(shape, blocks, mode)


def _in_table(shape: Shape) -> Mapping[Kind, Blocks]:
    found = measured(shape)
    if found is None:
        raise LookupError(f"{shape} is not in holdfast/models/stacked_convolution/blocks.py")
    return found
