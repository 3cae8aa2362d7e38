"""Measuring plans on a GPU: the time of a captured step, without the time of loading rows; or what an earlier
start measured for the same work."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

import torch

from holdfast.core.device import deterministic_math
from holdfast.core.errors import RunError
from holdfast.local.compile_ahead import Job, compile_ahead
from holdfast.local.compiled_code import Traced
from holdfast.local.lanes import lanes
from holdfast.local.measured_plans import Entry, Measured
from holdfast.local.plan import Plan
from holdfast.local.programs import forget, refusals

_STEPS = (2, 22)  # a short and a long trial; the difference of their times is used
_COMPILED = ("compiled-loop", "compiled-vmap")
_WORTH_COMPILING = {"compiled-vmap": 40.0, "compiled-loop": 400.0}
"""Seconds of captured training from which compiling pays. A compiled stack needs a half to a ninth of them, a
single compiled client two thirds or more; compiling itself takes 10 to 60 s."""
_STACKING_GAINS = 2.0
"""How much slower than single clients a captured stack may be for its compiled form to be the one that is
tried: compiling makes a stack 2 to 9 times as fast, and a single client's step 1.2 to 1.7 times."""

Answer = TypeVar("Answer")
Trials = Generator[list[Job], None, Answer]
"""Trials that stop before anything is compiled, and say which steps will be: those of several networks can
then be compiled at the same time."""


class Trial(Protocol):
    """What a plan is tried on."""

    def seconds(self, plan: Plan, rows: int, steps: int) -> float:
        """Measure the seconds of one client's step."""

    def traced(self, plan: Plan, rows: int) -> Traced | None:
        """The step of a program of so many rows, where it can be traced."""


def finished(trials: Trials[Answer]) -> Answer:
    """Carry out the trials of one network."""
    while True:
        try:
            compile_ahead(next(trials))
        except StopIteration as end:
            answer: Answer = end.value
            return answer


def all_finished(trials: Mapping[str, Trials[Answer]]) -> dict[str, Answer]:
    """Carry out the trials of several networks, whose steps are compiled at the same time."""
    done: dict[str, Answer] = {}
    jobs: list[Job] = []
    for name, each in trials.items():
        try:
            jobs += next(each)
        except StopIteration as end:
            done[name] = end.value
    compile_ahead(jobs)
    return {name: done[name] if name in done else finished(each) for name, each in trials.items()}


def measured(
    plans: Mapping[str, Plan],
    trial: Trial,
    rows: int,
    client_steps: float,
    groups: Sequence[int],
    device: torch.device,
    signature: str,
) -> Trials[Measured]:
    """Measure these plans, or find what was measured before."""
    with _as_in_the_run(plans, device):
        entry = _entry(plans, trial, rows, groups, device)
    found = None if entry is None else entry.read()
    if found is not None and found.tried >= _wanted(plans, found.times, client_steps):
        best = min(found.times, key=lambda name: found.times[name])
        if best in _COMPILED:
            yield jobs(trial, plans[best], device)
        return found
    times: dict[str, float] = {}
    with _as_in_the_run(plans, device):
        for name in plans:
            if name not in _COMPILED:
                _try(plans, name, trial, rows, times, device)
    wanted = _wanted(plans, times, client_steps)
    for name in _COMPILED:
        if name in wanted:
            if times:
                forget(signature)  # while another network is tried, programs of this one would hold memory
            yield jobs(trial, plans[name], device)
            with _as_in_the_run(plans, device):
                _try(plans, name, trial, rows, times, device)
    if not times:  # no plan can be captured
        with _as_in_the_run(plans, device):
            times["loop"] = 1e6 * trial.seconds(
                Plan("loop", precision=next(iter(plans.values())).precision), 1, 1
            )
    answer = Measured(times, tuple(name for name in plans if name in wanted and name not in times))
    if entry is not None:
        entry.write(answer)
    return answer


def jobs(trial: Trial, plan: Plan, device: torch.device, but: Sequence[int] = ()) -> list[Job]:
    """The steps of all programs of a compiled plan, but for some sizes, the largest first."""
    with deterministic_math(device, plan.precision):
        sizes = plan.sizes if plan.stacked else (1,)
        steps = [trial.traced(plan, size) for size in reversed(sizes) if size not in but]
    return [(step, device, plan.precision) for step in steps if step is not None]


def _wanted(plans: Mapping[str, Plan], times: Mapping[str, float], client_steps: float) -> set[str]:
    """The plans to try: the captured ones, and of the compiled ones at most that which may gain most, where
    the run is long enough for it."""
    if len(plans) == 1:
        return set(plans)
    captured = {name: time for name, time in times.items() if name not in _COMPILED}
    wanted = {name for name in plans if name not in _COMPILED}
    if not captured:
        return wanted
    best = min(captured.values())
    stacked = captured.get("captured-vmap", math.inf) <= _STACKING_GAINS * best
    compiled = "compiled-vmap" if stacked else "compiled-loop"
    if compiled in plans and best * 1e-6 * client_steps > _WORTH_COMPILING[compiled]:
        wanted.add(compiled)
    return wanted


def _try(
    plans: Mapping[str, Plan],
    name: str,
    trial: Trial,
    rows: int,
    times: dict[str, float],
    device: torch.device,
) -> None:
    """Measure a plan, unless it cannot run this model; with no other plan, that is an error."""
    plan, before = plans[name], refusals()
    together = min(rows, plan.together) if plan.stacked else lanes(rows, device)
    try:
        trial.seconds(plan, together, 1)
        if len(plans) > 1 and refusals() > before:  # the reason is in the log
            return
        short, long = (
            min(steps * trial.seconds(plan, together, steps) for _ in range(2)) for steps in _STEPS
        )
    except RunError:  # for example, vmap does not support LSTM
        if len(plans) == 1:
            raise
        return
    times[name] = 1e6 * max(long - short, 1e-9) / (_STEPS[1] - _STEPS[0])


def _entry(
    plans: Mapping[str, Plan], trial: Trial, rows: int, groups: Sequence[int], device: torch.device
) -> Entry | None:
    """Where the times of this work are kept; None where its step cannot be traced, so that nothing says
    whether other work is the same."""
    plan = plans.get("compiled-vmap", next(iter(plans.values())))
    step = trial.traced(replace(plan, name="compiled-vmap"), min(rows, plan.together))
    if step is None or step.operations is None:
        return None
    return Entry.of(step.operations, device, plan.precision, rows, groups, list(plans))


@contextmanager
def _as_in_the_run(plans: Mapping[str, Plan], device: torch.device) -> Iterator[None]:
    """The settings of arithmetic, which trials of several networks must not keep between them."""
    with deterministic_math(device, next(iter(plans.values())).precision):
        yield
