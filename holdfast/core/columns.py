"""A stack of updates [n, d] that several processes share: each has some of the columns of all rows.

Rules work on such a part as they would on the whole, because everything that they ask about all columns
(lengths, products of rows, counts) goes through `aggregators/geometry.py` and `aggregators/ordered.py`, which
add up what the processes find. So that the number of processes changes no bit, the columns are cut into
pieces whose places depend on d alone; a process has whole pieces, and what they give is always added up in
their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PIECES = 64
"""At most so many pieces; more processes than this have nothing to do while servers compute."""
ALIGNED = 64
"""Columns of a piece are a multiple of this, so that vector instructions see the same numbers together."""


class Ranks(Protocol):
    """The processes that share a stack. Every method is called by all of them, in the same order."""

    rank: int
    count: int

    def gather(self, value: Tensor) -> list[Tensor]:
        """What every rank has, in their order; shapes may differ."""

    def exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send one part to each rank; what each of them sent here, in their order. Shapes may differ."""

    def fold(self, start: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        """`add` of the last rank, of ... of the first, of `start`; the result is on every rank."""


def edges_of(total: int) -> tuple[int, ...]:
    """Where the pieces of so many columns begin, and the end of the last."""
    size = ALIGNED * max(1, -(-total // (PIECES * ALIGNED)))
    return (*range(0, total, size), total)


@dataclass(frozen=True)
class Columns:
    """The columns that this process has of a stack of `total`."""

    total: int
    ranks: Ranks

    @property
    def edges(self) -> tuple[int, ...]:
        return edges_of(self.total)

    def of_rank(self, rank: int) -> slice:
        """The columns of a rank: pieces next to each other."""
        edges, count = self.edges, self.ranks.count
        pieces = len(edges) - 1
        return slice(edges[rank * pieces // count], edges[(rank + 1) * pieces // count])

    def pieces(self) -> Iterator[slice]:
        """The pieces of this process, as slices of its own columns."""
        own = self.of_rank(self.ranks.rank)
        inner = [edge - own.start for edge in self.edges if own.start <= edge <= own.stop]
        return (slice(a, b) for a, b in zip(inner, inner[1:], strict=False))

    def mine(self, whole: Tensor) -> Tensor:
        """This process's part of [..., total]."""
        return whole[..., self.of_rank(self.ranks.rank)]

    def whole(self, mine: Tensor) -> Tensor:
        """[..., total] of the parts [..., own] of all processes."""
        return torch.cat(self.ranks.gather(mine.contiguous()), dim=-1)

    def add_up(self, zero: Tensor, parts: Iterable[Tensor]) -> Tensor:
        """The sum of what all pieces give, in their order: `parts` has one tensor for each piece of this
        process, of the shape of `zero`."""

        def add(so_far: Tensor) -> Tensor:
            for part in parts:
                so_far = so_far + part
            return so_far

        return self.ranks.fold(zero, add)


_CURRENT: ContextVar[Columns | None] = ContextVar("columns", default=None)


def current() -> Columns | None:
    """The columns that this process has, where it shares a stack with others."""
    return _CURRENT.get()


@contextmanager
def sharing(columns: Columns | None) -> Iterator[None]:
    """Inside, stacks of updates are parts of those of several processes."""
    token = _CURRENT.set(columns)
    try:
        yield
    finally:
        _CURRENT.reset(token)
