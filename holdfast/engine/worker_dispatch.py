"""Sending stacks of clients to worker processes: what is sent, what comes back, and when workers cannot be
used."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from holdfast.core.types import State
from holdfast.engine.client_stack import TaskResult
from holdfast.engine.run_context import Call, RunContext
from holdfast.engine.workers import Pool


class KeepsState(Exception):
    """A client half kept something outside its state, which other workers do not see."""


@dataclass
class WorkerDispatch:
    """Gives stacks to a pool of workers. The workers hold the experiments as they were when they were forked.
    Only `round` and the private rows of an experiment change in a run, so these are sent; for a new
    experiment the workers are forked again."""

    perform: Callable[[list[Call], Tensor, State], TaskResult]
    private_rows: Callable[[list[Call]], tuple[Tensor, State]]
    cells: list[RunContext] = field(default_factory=list)
    pool: Pool | None = None
    unfit: bool = False

    def carry_out(self, stacks: list[list[Call]], workers: int) -> Generator[TaskResult, None, None]:
        """The result of each stack, in order; only of the first few where workers turn out to be unusable:
        the caller performs the rest."""
        if self.unfit:
            return
        pool = self._pool([part.run_context for stack in stacks for part in stack], workers)
        try:
            yield from pool.answers([partial(self._message, stack) for stack in stacks])
        except KeepsState as found:
            self.close()
            self.unfit = True
            warnings.warn(
                f"{found}; worker processes cannot be used, this process does all the work",
                RuntimeWarning,
                stacklevel=2,
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.pool = None

    def _pool(self, cells: list[RunContext], workers: int) -> Pool:
        known = {id(run_context) for run_context in self.cells}
        new = {id(run_context): run_context for run_context in cells if id(run_context) not in known}
        if self.pool is None or new or self.pool.size < workers:
            self.close()
            self.cells += new.values()
            self.pool = Pool(workers, self._perform)
        return self.pool

    def _message(self, stack: list[Call]) -> Any:
        place = {id(run_context): place for place, run_context in enumerate(self.cells)}
        return [
            (place[id(part.run_context)], part.run_context.round, part.exchange, part.work) for part in stack
        ], *self.private_rows(stack)

    def _perform(self, message: Any) -> TaskResult:
        """Perform one stack, in a worker."""
        parts, known, stored = message
        stack = []
        for place, round, exchange, work in parts:
            self.cells[place].round = round
            stack.append(Call(self.cells[place], exchange, work))
        first = stack[0].run_context
        before = [(thing, _memory(thing)) for thing in (first.rule, first.recipe.loss)]
        done = self.perform(stack, known, stored)
        for thing, memory in before:
            for name in _changed(memory, _memory(thing)):
                owner = getattr(thing, "__qualname__", type(thing).__qualname__)
                raise KeepsState(
                    f"{owner}.{name} changes from call to call, and one process does not see what another"
                    " keeps"
                )
        return done


def _memory(thing: Any) -> dict[str, tuple[Any, int]]:
    """The attributes of an object, each with a mark that changes when it is changed in place."""

    def mark(value: Any) -> int:
        return value._version if isinstance(value, Tensor) else len(value) if isinstance(value, Sized) else 0

    return {name: (value, mark(value)) for name, value in getattr(thing, "__dict__", {}).items()}


def _changed(before: dict[str, tuple[Any, int]], after: dict[str, tuple[Any, int]]) -> list[str]:
    """Names whose value has changed. Where the value was None, a cache was filled, which every worker can do
    for itself."""

    def same(name: str, value: Any, mark: int) -> bool:
        return name in after and after[name][0] is value and after[name][1] == mark

    return [
        name for name, (value, mark) in before.items() if value is not None and not same(name, value, mark)
    ]
