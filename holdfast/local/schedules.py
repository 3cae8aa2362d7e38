"""Schedules: by which factor the clients' learning rate changes from round to round, or from step to step
within a round."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

from holdfast.core.errors import ConfigError
from holdfast.core.registry import Part, register, setting


class Schedule(Part):
    """A schedule of the clients' learning rate: `train.lr` times a factor.

    Over rounds, the factor depends on the round. Over steps, it depends on the local step and starts anew in
    every round; a client that takes 40 steps goes through all of it in these 40. What a method does after the
    last round (tuning, for example) has the factor of the last round.

        @register("schedule", "half-way")
        class HalfWay(Schedule):
            '''The full rate in the first half, a tenth in the second.'''

            def factor(self, place, length):
                return 1.0 if 2 * place < length else 0.1
    """

    over: Literal["rounds", "steps"] = setting(
        "rounds", "change from round to round, or from step to step within each round"
    )
    warmup: int = setting(0, "rounds (or steps) in which the rate first rises linearly to train.lr", ge=0)

    def factor(self, place: int, length: int) -> float:
        """Return the factor of a round or step, where `place` counts from 0 to `length` - 1, after the
        warm-up."""
        raise TypeError(f"{type(self).__name__} does not define a factor")

    def at(self, place: int, length: int) -> float:
        """Return the factor of a round or step, with the warm-up: 1/5, 2/5, 3/5, 4/5, 1 where that takes
        4."""
        if place < self.warmup:
            return (place + 1) / (self.warmup + 1)
        return self.factor(place - self.warmup, max(1, length - self.warmup))

    def of_round(self, round: int, rounds: int) -> float:
        """Return the factor of a round, counted from 1; 1 where the schedule is one over steps."""
        return 1.0 if self.over == "steps" else self.at(min(round, rounds) - 1, rounds)

    def of_steps(self, round: int, steps: int) -> list[float]:
        """Return the factor of each of a client's steps in this round."""
        return [self.at(step, steps) for step in range(steps)]


@register("schedule", "constant")
class Constant(Schedule):
    """The same learning rate throughout, after the warm-up if there is one."""

    def factor(self, place: int, length: int) -> float:
        return 1.0


@register("schedule", "warm-up")
class WarmUp(Constant):
    """A learning rate that rises linearly in the first rounds (or steps) and then stays."""

    warmup: int = setting(5, "rounds (or steps) in which the rate first rises linearly to train.lr", ge=0)


@register("schedule", "step")
class StepDecay(Schedule):
    """The learning rate times gamma after every so many rounds (or steps)."""

    gamma: float = setting(0.1, "factor after every so many rounds (or steps)", gt=0, le=1)
    every: int = setting(10, "number of these rounds (or steps)", ge=1)

    def factor(self, place: int, length: int) -> float:
        return self.gamma ** (place // self.every)


@register("schedule", "exponential")
class Exponential(Schedule):
    """The learning rate times gamma after every round (or step).

    Over rounds this is `train.lr_decay`."""

    gamma: float = setting(0.99, "factor after every round (or step)", gt=0, le=1)

    def factor(self, place: int, length: int) -> float:
        return self.gamma**place


@register(
    "schedule",
    "cosine",
    paper="Loshchilov, Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, ICLR 2017",
)
class Cosine(Schedule):
    """The learning rate falls along half a cosine, from train.lr to a floor.

    The floor would be reached in the round (or step) after the last one."""

    floor: float = setting(0.0, "where it ends, as a share of train.lr", ge=0, le=1)
    length: int | None = setting(
        None, "rounds (or steps) until it reaches the floor, and then stays; none: all of them", ge=1
    )

    def factor(self, place: int, length: int) -> float:
        share = min(1.0, place / (self.length or length))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2


class FunctionSchedule(Schedule):
    """A Python function of the round, or of the round and the local step; both count from 1."""

    function: Any
    name = "function"

    def of_round(self, round: int, rounds: int) -> float:
        return 1.0 if self.over == "steps" else self._called(min(round, rounds))

    def of_steps(self, round: int, steps: int) -> list[float]:
        return [self._called(round, step + 1) for step in range(steps)]

    def _called(self, *places: int) -> float:
        factor = self.function(*places)
        try:
            value = float(factor)
        except (TypeError, ValueError):
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"schedule: the function returned {factor!r} for {', '.join(map(str, places))}; it must"
                " return a number of at least 0, by which train.lr is multiplied"
            )
        return value


def function_schedule(function: Callable[..., Any]) -> FunctionSchedule:
    """Return a function as a schedule: over rounds where it takes one argument, over steps where it takes
    two."""
    try:
        taken = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]
    except ValueError:  # some built-in functions have no signature
        taken = []
    if len(taken) not in (1, 2):
        raise ConfigError(
            f"schedule: a function must take the round, or the round and the step; this one takes"
            f" {len(taken)} arguments"
        )
    return FunctionSchedule(function=function, over="rounds" if len(taken) == 1 else "steps")
