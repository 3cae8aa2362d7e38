"""A simulator for measurements: every exchange is carried out for real, but training is cut to a share of its
steps; the time of each exchange and its steps, actual and in full, are recorded.

The share is the same for every client, so that short and long clients of a stack end in the same order as in
the run. It alternates between two values, which separates the time that depends on the number of steps from
the time that does not.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.core.peak_memory import peak
from holdfast.core.types import Uplink
from holdfast.engine.client_stack import ClientStack
from holdfast.engine.client_task import EVALUATE
from holdfast.engine.run_context import Call
from holdfast.engine.simulator import Simulator
from holdfast.local.client import Local
from holdfast.local.fit import Fitted, Recipe
from holdfast.local.plan import REPLAYED, Plan


@dataclass(frozen=True)
class TrainingWork:
    """The work of one training, or of all in an exchange. Rows are what a device computes: on a replayed
    stack, padding too."""

    steps: float = 0.0
    rows: float = 0.0
    steps_in_full: float = 0.0
    rows_in_full: float = 0.0
    more_on_host: float = 0.0
    """Bytes by which the batch orders of the full training are larger."""
    more_on_device: float = 0.0


@dataclass(frozen=True)
class TimedExchange:
    """One fused exchange and the time it took."""

    round: int
    task: str
    evaluation: bool
    group: tuple[Any, ...]
    seconds: float
    work: TrainingWork


def own_steps(count: Tensor, recipe: Recipe) -> np.ndarray:
    """Return the number of steps that each client takes in one training."""
    samples = count.cpu().numpy()
    per_epoch = samples // recipe.batch_size if recipe.drop_last else -(-samples // recipe.batch_size)
    if recipe.steps is not None:
        return np.where(per_epoch > 0, np.asarray(recipe.steps), 0)
    return per_epoch * np.asarray(recipe.epochs)


def computed_rows(steps: np.ndarray, plan: Plan) -> float:
    """Return the steps of these rows, including those that a replayed stack computes in vain."""
    if not len(steps) or not plan.stacked or plan.name not in REPLAYED:
        return float(steps.sum())
    total = 0.0
    for part in np.array_split(np.sort(steps)[::-1], -(-len(steps) // plan.together)):
        if plan.attempts(len(part))[0] not in REPLAYED:
            total += float(part.sum())
            continue
        active = len(part) - np.searchsorted(part[::-1], np.arange(part.max(initial=0)), side="right")
        for rows, times in zip(*np.unique(active, return_counts=True), strict=True):
            total += times * (plan.size(int(rows)) if plan.sizes else len(part))
    return total


@dataclass(frozen=True)
class ShortLocal(Local):
    """What a client half sees, with every training cut to a share of its steps."""

    share: float = 1.0
    note: Callable[[TrainingWork], None] = lambda work: None

    def fit(self, model: Tensor, *, purpose: str = "fit", **options: Any) -> Fitted:
        asked = {name: options[name] for name in options if name in Recipe.__dataclass_fields__}
        if "epochs" in asked:
            asked.setdefault("steps", None)
        own = own_steps(self.data.count, replace(self.recipe, **asked))
        short = np.ceil(own * self.share).astype(np.int64)
        self.note(self._work(own, short, len(model)))
        if self.share < 1.0:
            options["steps"] = torch.from_numpy(short)
        return super().fit(model, purpose=purpose, **options)

    def _work(self, own: np.ndarray, short: np.ndarray, rows: int) -> TrainingWork:
        times, batch = rows // max(self.n, 1), self.recipe.batch_size
        more = float(own.max(initial=0) - short.max(initial=0)) * batch
        together = min(rows, self.plan.together)
        on_gpu = self.initial.is_cuda
        return TrainingWork(
            float(short.sum()) * times,
            computed_rows(np.tile(short, times), self.plan),
            float(own.sum()) * times,
            computed_rows(np.tile(own, times), self.plan),
            # the order of all clients; for the rows of a stack its positions, labels and masks
            more * (8 * self.n + (8 if on_gpu else 32) * together),
            more * 17 * together if on_gpu else 0.0,
        )


@dataclass
class ShortClientStack(ClientStack):
    """A stack of clients whose trainings are cut to a share of their steps, which depends on the round."""

    share: Callable[[int], float] = lambda round: 1.0
    note: Callable[[TrainingWork], None] = lambda work: None

    def local(self, calls: list[Call]) -> Local:
        local = super().local(calls)
        given: Mapping[str, Any] = {item.name: getattr(local, item.name) for item in fields(Local)}
        return ShortLocal(**given, share=self.share(local.round), note=self.note)


@dataclass
class ShortRoundEngine(Simulator):
    shares: tuple[float, float] = (1.0, 1.0)
    """Shares of the steps in even and in odd rounds; set before the first round, because workers do not
    receive changes."""
    new_round: Callable[[int], None] = lambda round: None
    timed: list[TimedExchange] = field(default_factory=list)
    began: dict[int, float] = field(default_factory=dict)
    """Time of the first exchange of each round."""
    workers_peak: int = 0
    # workers write into it too
    _noted: Any = field(default_factory=lambda: multiprocessing.Array("d", len(fields(TrainingWork))))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.clients = ShortClientStack(
            self.plans, self.device, lambda round: self.shares[round % 2], self._note
        )

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]:
        round = calls[0].run_context.round
        if round not in self.began:
            self.began[round] = time.perf_counter()
            self.new_round(round)
        return super().exchange(calls)

    def close(self) -> None:
        if self._dispatch is not None and self._dispatch.pool is not None:
            self.workers_peak = sum(peak(pid) for pid in self._dispatch.pool.pids)
        super().close()

    def _answer_group(self, calls: list[Call]) -> list[Uplink]:
        self._noted[:] = [0.0] * len(self._noted)
        run_context, exchange = calls[0].run_context, calls[0].exchange
        began = time.perf_counter()
        answers = super()._answer_group(calls)
        evaluation = exchange.task == EVALUATE or exchange.discard_state
        seconds = time.perf_counter() - began
        self.timed.append(
            TimedExchange(
                run_context.round,
                exchange.task,
                evaluation,
                run_context.group(exchange.task),
                seconds,
                TrainingWork(*self._noted),
            )
        )
        return answers

    def _note(self, work: TrainingWork) -> None:
        with self._noted.get_lock():
            for place, item in enumerate(fields(TrainingWork)):
                value, before = getattr(work, item.name), self._noted[place]
                self._noted[place] = max(before, value) if item.name.startswith("more") else before + value


def shares(expected: float, longest: float) -> tuple[float, float]:
    """Return the shares for even and odd rounds, where a whole round of training is expected to take
    `expected` seconds."""
    high = min(1.0, longest / expected) if expected > 0 and math.isfinite(expected) else 1.0
    return 0.3 * high, high
