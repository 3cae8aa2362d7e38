"""A stack of updates [n, d] that several processes share: each has some of the columns of all rows.

Rules work on such a part as they would on the whole, because everything that they ask about all columns
(lengths, products of rows, counts) goes through `aggregators/geometry.py` and `aggregators/ordered.py`, which
add up what the processes find. So that the number of processes changes no bit, the columns are cut into
pieces whose places depend on d alone; a process has whole pieces, and what they give is always added up in
their order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Reads = Literal["sum", "columns", "gram", "rows"]
"""How a rule reads a stack that several processes share: a weighted sum of the rows; each column by itself;
lengths, distances or products of rows, which the processes add up; or whole rows, which each process then has
to gather."""
READS: tuple[Reads, ...] = ("sum", "columns", "gram", "rows")
"""From what needs least of other processes to what needs most."""
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

    def agree(self, mine: Any) -> list[Any]:
        """What every rank says, in their order: plain data that JSON can hold."""


class OneRank:
    """A single process that has all columns. It computes in the same order as several do."""

    rank, count = 0, 1

    def gather(self, value: Tensor) -> list[Tensor]:
        return [value]

    def exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)

    def fold(self, start: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        return add(start)

    def agree(self, mine: Any) -> list[Any]:
        return [mine]


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

    @property
    def width(self) -> int:
        """How many columns this process has."""
        own = self.of_rank(self.ranks.rank)
        return own.stop - own.start

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

    def of_rows(self, rows: Tensor, owners: Tensor) -> Tensor:
        """[n, own columns] of all rows, where each process has some whole ones: `owners` [n] says which of
        all rows are whose, `rows` are those of this process, in this order."""
        sent = [rows[:, self.of_rank(rank)].contiguous() for rank in range(self.ranks.count)]
        found = rows.new_empty(len(owners), sent[self.ranks.rank].shape[1])
        for rank, part in enumerate(self.ranks.exchange(sent)):
            found[owners == rank] = part
        return found

    def add_up(self, zero: Tensor, parts: Iterable[Tensor]) -> Tensor:
        """The sum of what all pieces give, in their order: `parts` has one tensor for each piece of this
        process, of the shape of `zero`."""

        def add(so_far: Tensor) -> Tensor:
            for part in parts:
                so_far = so_far + part
            return so_far

        return self.ranks.fold(zero, add)


def reads_of(part: Any) -> Reads:
    """How a part reads the updates. What a class outside Holdfast inherits from one of Holdfast's does not
    count: it may look at more of them. It says so itself, or is handed whole rows."""
    kind = type(part)
    trusted = kind.__module__.startswith("holdfast.") or "reads" in vars(kind)
    return part.reads if trusted else "rows"


def warn_of_rows(who: str, columns: Columns, size: int) -> None:
    """Say that each process has to gather whole updates, of numbers with so many bytes. Python shows the same
    warning once."""
    if columns.ranks.count > 1:
        each = f"{max(1, round(columns.total * size / 1e3)):,} kB for each client of a round"
        warnings.warn(
            f"{who} reads whole updates, so every process gathers those of all: {each}",
            RuntimeWarning,
            stacklevel=3,
        )


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
