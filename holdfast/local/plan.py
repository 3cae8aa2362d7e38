"""Plans: how a stack is trained on this machine, one client after the other or as one batched computation,
and how many rows at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.core.device import Precision
from holdfast.models.network import Network

PlanName = Literal["loop", "vmap", "captured-loop", "captured-vmap", "compiled-loop", "compiled-vmap"]
"""One client after the other, or a stack of them; each step asked for anew, replayed as it was captured, or
compiled and replayed."""
Where = Literal["host", "device"]
STACKED = frozenset({"vmap", "captured-vmap", "compiled-vmap"})
REPLAYED = frozenset({"captured-loop", "captured-vmap", "compiled-loop", "compiled-vmap"})
_NEXT_BEST: dict[str, tuple[PlanName, ...]] = {
    "loop": ("loop",),
    "vmap": ("vmap",),
    "captured-loop": ("captured-loop", "loop"),
    "captured-vmap": ("captured-vmap", "vmap"),
    "compiled-loop": ("compiled-loop", "captured-loop", "loop"),
    "compiled-vmap": ("compiled-vmap", "captured-vmap", "vmap"),
}
_TOO_FEW = (
    4  # a stack that fills less than one part in so many of a fixed size is better off without the padding
)
# Bytes of a stack on a CPU. Larger ones are 10 to 40 % slower: every layer waits for memory, and freed pages
# are cleared again each step.
_CACHED = 48 * 10**6
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """A choice that is written into the manifest: bits may depend on it. `rows` is the most rows that are
    held in memory."""

    name: PlanName = "loop"
    rows: int = 1024
    stack: int | None = None
    """How many of them take a step together under plan `vmap`; by default all."""
    microseconds: float | None = None
    """Measured time of one step of one client, where it was measured."""
    memory: int | None = None
    """The bound in bytes that `rows` follows from, where there is one; what a whole cohort sends stays in
    memory only within it."""
    precision: Precision = "fp32"
    sizes: tuple[int, ...] = ()
    """Numbers of rows that a replayed stack is padded to, so that few programs serve all cohorts; none: each
    its own."""
    server: Where = "host"
    """Where what clients send is kept, and servers, attacks and screening compute."""
    workers: int = 1
    """Processes that share the clients of an exchange; `rows` is then what each of them holds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(sorted(self.sizes)))  # a manifest holds a list

    @property
    def stacked(self) -> bool:
        return self.name in STACKED

    @property
    def together(self) -> int:
        """The most rows that are handed to one training."""
        most = min(self.rows, self.stack or self.rows) if self.stacked else self.rows
        return min(most, self.sizes[-1]) if self.name in REPLAYED and self.stacked and self.sizes else most

    def attempts(self, rows: int) -> tuple[PlanName, ...]:
        """The plan for so many rows, and those that replace it where it cannot run. Only the number of rows
        decides, since bits depend on it."""
        order = _NEXT_BEST[self.name]
        padded = self.stacked and self.size(rows) > _TOO_FEW * rows
        return order[-1:] if padded else order

    def size(self, rows: int) -> int:
        """How many rows a program for these has."""
        return 1 if not self.stacked else min((size for size in self.sizes if size >= rows), default=rows)


def bytes_per_row(network: Network, sample: Tensor, batch_size: int, kept: int = 1) -> int:
    """What one client of a stack needs while it trains: its tensors (model before, in training and after,
    target, gradient, `kept` ones of the optimiser such as a momentum, temporaries) and activations: half as
    much again, because indices of poolings and the gradients of one layer come on top."""
    values = (
        network.layout.size * (9 + max(1, kept))
        + 3 * batch_size * (activations(network.module, sample) + sample.numel()) // 2
    )
    return values * torch.empty((), dtype=network.dtype).element_size()


def activations(module: nn.Module, sample: Tensor) -> int:
    """Numbers that one sample leaves behind in a forward pass, counted at the leaves."""
    total = 0

    def count(_module: nn.Module, _inputs: object, output: object) -> None:
        nonlocal total
        total += output.numel() if isinstance(output, Tensor) else 0

    leaves = [m for m in module.modules() if not list(m.children())]
    hooks = [leaf.register_forward_hook(count) for leaf in leaves]
    training = module.training
    try:
        with torch.no_grad():
            module.eval()(sample[None])
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    return total


def bounded(plan: Plan, memory: int, row_bytes: int, device: torch.device = _CPU) -> Plan:
    """The same plan within a memory bound, and on a CPU with stacks that fit its caches."""
    rows = max(1, min(plan.rows, memory // max(row_bytes, 1)))
    cached = max(1, min(rows, _CACHED // max(row_bytes, 1)))
    return replace(
        plan, rows=rows, memory=memory, stack=cached if plan.stacked and device.type == "cpu" else None
    )


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Work with this many threads (None: as many as now). Bits may depend on it, so it is part of a run."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
