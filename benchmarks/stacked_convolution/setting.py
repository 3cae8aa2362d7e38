"""What is measured on which device, and the block sizes that are tried."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.bench.steps import WORKS, Work

from .layer import Blocks, Choice, Kind, Mode, Shape

FEDCAP = {"first": Shape(10, 3, 32, 32, 5, samples=True), "second": Shape(10, 32, 14, 64, 5)}
"""The convolutions of FedCAP's CIFAR-10 network for a batch of one client."""
TINY = {"first": Shape(2, 1, 12, 4, 5, samples=True), "second": Shape(2, 4, 4, 8, 3, 1)}
"""In their place for the interpreter."""
FEDCAP_28 = {"first": Shape(2, 1, 28, 16, 5, samples=True), "second": Shape(2, 16, 12, 32, 5)}
"""The convolutions of FedCAP's network for images of 28 x 28, for a batch of two."""
TRIED: dict[tuple[str, Kind], tuple[Blocks, ...]] = {
    ("first", "forward"): (
        Blocks(32, 128, 16),
        Blocks(32, 128, 32),
        Blocks(32, 128, 16, turned=True),
        Blocks(32, 256, 16, warps=8),
        Blocks(32, 128, 16, stages=1),
        Blocks(32, 64, 16),
    ),
    ("first", "weights"): (
        Blocks(32, 128, 32, splits=5),
        Blocks(32, 128, 32, splits=5, turned=True),
        Blocks(32, 128, 32, splits=10),
        Blocks(32, 128, 32, splits=2),
        Blocks(32, 128, 64, splits=5, turned=True),
        Blocks(32, 128, 32, splits=5, stages=1),
    ),
    ("second", "forward"): (
        Blocks(64, 128, 32, turned=True),
        Blocks(64, 128, 32),
        Blocks(64, 128, 32, stages=1),
        Blocks(64, 128, 32, stages=1, turned=True),
        Blocks(64, 256, 32, warps=8, turned=True),
        Blocks(64, 64, 64),
    ),
    ("second", "weights"): (
        Blocks(64, 128, 32),
        Blocks(64, 128, 32, turned=True),
        Blocks(64, 128, 32, stages=1),
        Blocks(64, 256, 32, warps=8),
        Blocks(64, 64, 64),
        Blocks(64, 128, 32, splits=2),
    ),
    ("second", "images"): (
        Blocks(32, 128, 32, turned=True),
        Blocks(32, 128, 32),
        Blocks(32, 128, 32, stages=1, turned=True),
        Blocks(32, 128, 64, turned=True),
        Blocks(32, 256, 32, warps=8, turned=True),
        Blocks(32, 64, 64, turned=True),
    ),
}
"""The first ones are used where there is no time to try."""
SLOW = Blocks(16, 16, 16, splits=2)  # for float64, which needs no tensor cores, and for small shapes
SMALL = (
    Shape(2, 3, 6, 4, 3, 1),
    Shape(2, 2, 8, 5, 5),
    Shape(2, 3, 8, 4, 3, 1, pooled=True),
    Shape(1, 2, 8, 5, 5, pooled=True, samples=True),
)
Choices = dict[tuple[str, bool, str], Choice]
"""By layer, whether it is pooled, and precision."""


@dataclass(frozen=True)
class Setting:
    """What runs on a device: everything on a GPU, tiny shapes by an interpreter on a CPU."""

    device: str
    shapes: dict[str, Shape]
    tried: dict[tuple[str, Kind], tuple[Blocks, ...]]
    clients: tuple[int, ...]
    precisions: tuple[Mode, ...]
    layouts: tuple[bool, ...]
    """Whether channels are innermost in memory."""
    works: tuple[Work, ...]
    in_works: dict[str, Shape]
    """The layers of the networks of the works."""
    turns: int
    seconds: float
    """How long each form runs in a turn, about."""

    @classmethod
    def of(cls, device: str) -> Setting:
        if device != "cpu":
            works = {work.name: work for work in WORKS}
            steps, both = (works["cifar-48x20"], works["cifar-20"]), (True, False)
            return cls(device, FEDCAP, TRIED, (960, 20), ("tf32", "bf16"), both, steps, FEDCAP, 7, 0.03)
        tried = {key: (Blocks(16, 128, 32), Blocks(16, 128, 32, turned=True)) for key in TRIED}
        images = {"name": "synthetic", "shape": (1, 28, 28)}
        work = Work("tiny", {"name": "fedcap-cnn"}, images, clients=2, samples=2, batch_size=2)
        return cls(device, TINY, tried, (2,), ("tf32",), (True,), (work,), FEDCAP_28, 1, 0.0)

    def layers(self, pooled: bool) -> dict[str, Shape]:
        return {layer: replace(shape, pooled=pooled) for layer, shape in self.shapes.items()}

    def first_choices(self) -> Choices:
        """The choices for a part that runs without `blocks` before it."""
        return {
            (layer, pooled, mode): Choice(
                shape, {kind: self.tried[layer, kind][0] for kind in shape.kinds}, mode, self.layouts[0]
            )
            for pooled in (False, True)
            for layer, shape in self.layers(pooled).items()
            for mode in self.precisions
        }
