"""Several ranks as threads of one process, for tests of what processes do together (core/columns.py).

    results = on_ranks(3, lambda ranks: Columns(500, ranks).whole(...))    # one result for each rank

A rank that fails, or that waits for the others for too long, ends them all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds that a rank waits for the others."""


class ThreadRanks:
    """What `Ranks` asks for, in one of several threads."""

    def __init__(self, rank: int, count: int, barrier: threading.Barrier, table: list[Any]):
        self.rank, self.count = rank, count
        self._barrier, self._table = barrier, table
        """What each rank has put down for the others to see."""

    def _shown(self, mine: Any) -> list[Any]:
        """What every rank puts down."""
        self._table[self.rank] = mine
        self._barrier.wait(PATIENCE)
        found = list(self._table)
        self._barrier.wait(PATIENCE)  # before anyone puts down the next thing
        return found

    def gather(self, value: Tensor) -> list[Tensor]:
        return [each.clone() for each in self._shown(value)]

    def exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        assert len(parts) == self.count
        return [each[self.rank].clone() for each in self._shown(parts)]

    def fold(self, start: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        so_far = start
        for rank in range(self.count):
            so_far = self._shown(add(so_far) if rank == self.rank else None)[rank]
        return so_far.clone()

    def agree(self, mine: Any) -> list[Any]:
        return self._shown(mine)


def on_ranks(count: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """What `work` returns on each of so many ranks; the first error of any."""
    barrier, table = threading.Barrier(count), [None] * count
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, count, barrier, table))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.insert(0, error)
            errors.append(error)
            barrier.abort()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
