"""How far along a line attackers should go, found by trying the server's actual rule."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from holdfast.aggregators.base import Reduced
from holdfast.attacks.shared_rows import length
from holdfast.attacks.target import Trial

_RATIO = 0.8  # ByzFL's: by how much a step shrinks
EVALUATIONS = "how often the rule is tried"
STEP = "the first step of the search; each step that helps is doubled"


def highest(score: Callable[[float], float], evaluations: int, step: float) -> float:
    """Where a score over gamma >= 0 is highest, as far as so many evaluations show: doubling steps from 0 as
    long as they help, then steps to either side of the best value that shrink to 4 / 5 after each pair. ByzFL
    searches so upwards only."""
    best, top, left = 0.0, score(0.0), evaluations - 1

    def better(gamma: float) -> bool:
        nonlocal best, top, left
        left -= 1
        found = score(gamma)
        if found > top:
            best, top = gamma, found
            return True
        return False

    while left > 0 and better(best + step):
        step *= 2
    while left > 0:
        step *= _RATIO
        if not better(best + step) and left > 0 and best > step:
            better(best - step)
    return best


def last_that_fits(fits: Callable[[float], bool], evaluations: int, step: float) -> float:
    """The largest gamma that fits, as far as so many evaluations show: from 0, which is taken to fit, in
    doubling steps as long as they fit, then by halving."""
    low, high, left = 0.0, step, evaluations
    while left > 0 and fits(high):
        low, high, left = high, high + 2 * (high - low), left - 1
    left -= 1
    while left > 0:
        middle, left = (low + high) / 2, left - 1
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def most_harmful(trial: Trial, start: Tensor, direction: Tensor, evaluations: int, step: float) -> Tensor:
    """The point start + gamma * direction that moves the aggregate farthest from the benign mean."""

    def harm(gamma: float) -> float:
        return float(length(trial(start + gamma * direction).value - trial.benign))

    return start + highest(harm, evaluations, step) * direction


def farthest_chosen(trial: Trial, start: Tensor, direction: Tensor, evaluations: int, step: float) -> Tensor:
    """The farthest point start + gamma * direction at which the rule still chooses the attackers: gives
    weight to as many of them as it gives weight to clients, or to all of them."""

    def fits(gamma: float) -> bool:
        return chosen(trial, trial(start + gamma * direction))

    return start + last_that_fits(fits, evaluations, step) * direction


def chosen(trial: Trial, found: Reduced) -> bool:
    used = found.weights > 0
    mine = int(used[trial.attackers].sum())
    return mine == min(len(trial.attackers), int(used.sum())) and not found.fallback
