"""Choose a plan by measuring a few steps of each on the real data, and forecast what the run will cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

import numpy as np
import torch
from torch import Tensor

from holdfast.core.device import Precision, deterministic_math
from holdfast.core.error_origin import in_brackets
from holdfast.core.errors import HoldfastError, RunError
from holdfast.core.keys import Key
from holdfast.data.federation import Padded, Samples
from holdfast.local.compile_ahead import compile_ahead
from holdfast.local.compiled_code import Traced
from holdfast.local.device_trials import Trials, finished, jobs, measured
from holdfast.local.fit import Recipe, fit, stack_of
from holdfast.local.lanes import lanes
from holdfast.local.measured_plans import Measured
from holdfast.local.per_client import training
from holdfast.local.plan import REPLAYED, Plan, PlanName, bounded, bytes_per_row
from holdfast.local.programs import forget, traced
from holdfast.local.stack_sizes import cut, worthwhile
from holdfast.models.network import Network

_STEPS = 2
_ENOUGH = 0.5  # seconds of trials that are enough for a reliable choice
_TURNS = (3, 12)  # fewest and most turns of each plan, while all trials together take less than a second
# seconds that one trial of a plan should take; its number of rows is chosen for that
_LOOP, _STACK = 0.03, 0.3
_SLOW = 0.1  # a step that takes more seconds than this is slow
# vmap is chosen only below this share of the loop's time; otherwise loop, the simpler plan that a real client
# runs too
_CLEARLY = 0.95


@dataclass(frozen=True)
class Forecast:
    """The chosen plan, the measured microseconds of a client's step under each plan, and the expected memory
    of a stack."""

    plan: Plan
    measured: dict[str, float]
    memory: int
    source: str = ""
    """Where the times come from, if not from a trial of this start."""

    def seconds(self, client_steps: float) -> float | None:
        micro = self.measured.get(self.plan.name)
        return None if micro is None else micro * client_steps * 1e-6


def choose(
    asked: str,
    network: Network,
    initial: Tensor,
    samples: Samples,
    data: Padded,
    recipe: Recipe,
    rows: int,
    memory: int,
    precision: Precision = "fp32",
    client_steps: float = 0.0,
    sizes: Sequence[int] = (),
) -> Forecast:
    """Choose a plan and forecast its time and memory.

    `asked` is a plan's name or auto; `rows` is the largest number of models trained at once, `sizes` the
    number in each group of experiments, `client_steps` the number of steps in the whole run. Auto takes the
    faster plan, and a plan that must be compiled only where the run is long enough."""
    return finished(
        choosing(
            asked,
            network,
            initial,
            samples,
            data,
            recipe,
            rows,
            memory,
            precision,
            client_steps,
            sizes,
        )
    )


def choosing(
    asked: str,
    network: Network,
    initial: Tensor,
    samples: Samples,
    data: Padded,
    recipe: Recipe,
    rows: int,
    memory: int,
    precision: Precision = "fp32",
    client_steps: float = 0.0,
    sizes: Sequence[int] = (),
) -> Trials[Forecast]:
    """The same, for one of several networks."""
    device = data.rows.device
    sample = samples.blank(network.dtype)
    network.module.to(device)
    per_row = bytes_per_row(network, sample, recipe.batch_size, recipe.held())
    groups = tuple(sizes) or (rows,)
    plans = {name: _plan(name, groups, memory, per_row, precision, device) for name in get_args(PlanName)}
    if asked != "auto":
        names = [asked]
    elif device.type == "cuda":
        names = ["captured-loop", "captured-vmap", "compiled-loop", "compiled-vmap"]
    else:
        names = ["loop"] if plans["vmap"].stack == 1 else ["loop", "vmap"]
    if int(data.count.max()) == 0:
        return Forecast(plans[names[0]], {}, 0)
    trial = _Trial(network, initial, samples, data, recipe)
    candidates = {name: plans[name] for name in names}
    if device.type == "cpu":
        with deterministic_math(device, precision):
            found = Measured(_compare(candidates, trial, rows))
    else:
        found = yield from measured(candidates, trial, rows, client_steps, groups, device, network.signature)
    times = dict(found.times)
    best = min(times, key=lambda name: times[name])
    if device.type == "cuda" and len(names) > 1:  # the plans that were not chosen hold memory too
        forget(network.signature, but=best)
    if "loop" in times and times[best] >= _CLEARLY * times["loop"]:
        best = "loop"
    plan = replace(plans[best], microseconds=round(times[best], 2))
    if plan.sizes:
        at_once = [min(group, plan.rows) for group in groups]
        asked_for = plan.sizes
        plan = replace(
            plan,
            sizes=worthwhile(
                at_once, _steps(data, recipe), times[best], client_steps, memory // max(per_row, 1)
            ),
        )
        if device.type == "cuda" and plan.name == "compiled-vmap":  # while the others are at work
            compile_ahead(jobs(trial, plan, device, but=asked_for), here=0)
    held = min(rows, plan.rows)
    together = min(held, plan.together) if plan.stacked else lanes(held, device)
    # bytes of a row before or after it is trained: its models and what it sends
    waiting = 6 * initial.numel() * initial.element_size()
    return Forecast(plan, times, per_row * together + waiting * (held - together), found.sentence())


def _plan(
    name: str, groups: Sequence[int], memory: int, per_row: int, precision: Precision, device: torch.device
) -> Plan:
    plan = bounded(Plan(cast(PlanName, name), precision=precision), memory, per_row, device)
    if name not in REPLAYED or not plan.stacked:
        return plan
    rows = cut(groups, plan.rows, memory // max(per_row, 1))
    return replace(plan, rows=rows, sizes=tuple({min(group, rows) for group in groups}))


def _steps(data: Padded, recipe: Recipe) -> np.ndarray:
    """Return how many steps each of these clients takes in one training."""
    if recipe.steps is not None:
        return np.full(len(data.count), int(recipe.steps))
    count = data.count.cpu().numpy()
    per_epoch = count // recipe.batch_size if recipe.drop_last else -(-count // recipe.batch_size)
    return per_epoch * int(recipe.epochs)


@dataclass(frozen=True)
class _Trial:
    """A trial runs a few steps of the clients that have the most samples."""

    network: Network
    initial: Tensor
    samples: Samples
    data: Padded
    recipe: Recipe

    def seconds(self, plan: Plan, rows: int, steps: int = _STEPS) -> float:
        """Measure the seconds of one client's step."""
        stack, model, key = self._rows(rows)
        trial = self._short(plan, steps)
        started = time.perf_counter()
        try:
            fit(self.network, model, self.samples, stack, key, trial, plan)
        except HoldfastError:
            raise
        except Exception as error:  # a user's module and loss run here for the first time
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            said = f"{type(error).__name__}: {reason}{in_brackets(error)}"
            if self.recipe.sample_clip is not None:
                said += (
                    '; privacy.level = "sample" needs the gradients of single samples by torch.func.vmap,'
                    " which some layers (nn.LSTM, for example) cannot do"
                )
            raise RunError(f"model: a first step on plan {plan.name} failed: {said}") from error
        if model.is_cuda:
            torch.cuda.synchronize(model.device)
        return (time.perf_counter() - started) / (rows * steps)

    def traced(self, plan: Plan, rows: int) -> Traced | None:
        """The step of a program of so many rows, where it can be traced."""
        data, model, key = self._rows(rows)
        with training():
            stack = stack_of(self.network, model, self.samples, data, key, self._short(plan, 1))
            return traced(stack, rows, plan)

    def _rows(self, rows: int) -> tuple[Padded, Tensor, Key]:
        """The data, the models and the keys of so many clients."""
        data = self.data
        busiest = data.count.argsort(descending=True)[torch.arange(rows) % int((data.count > 0).sum())].cpu()
        where = busiest.to(data.rows.device)
        stack = Padded(data.rows[where], data.labels[where], data.count[busiest])
        model = self.initial.to(data.rows.device).expand(rows, -1)
        return stack, model, Key(0).fold(torch.arange(rows))

    def _short(self, plan: Plan, steps: int) -> Recipe:
        """The recipe for so many steps, which change next to nothing. A program is made as the run will need
        it: one without a momentum, say, would be of no use there."""
        if plan.name in REPLAYED:
            return replace(self.recipe, steps=steps, lr=1e-6)
        return replace(
            self.recipe,
            steps=steps,
            lr=1e-6,
            momentum=0.0,
            weight_decay=0.0,
            drop_last=False,
            schedule=None,
        )


def _compare(plans: dict[str, Plan], trial: _Trial, rows: int) -> dict[str, float]:
    """Measure the microseconds of a client's step under each plan.

    The plans take turns and the fastest turn counts, because another process may slow any of them. A model
    with slow steps is tried on few rows and in few turns. Where there is a choice, a plan that cannot run the
    model is left out (vmap does not support LSTM)."""
    began = time.perf_counter()
    step = trial.seconds(Plan("loop"), 1)
    slow = step > _SLOW
    found: dict[str, list[float]] = {name: [] for name in plans}
    if slow and "loop" in plans:
        found["loop"].append(step)  # the first trial includes the warm-up, which matters only for short steps
    sizes = {
        name: _trial_rows(name, plan, rows, step if slow else trial.seconds(Plan("loop"), 1))
        for name, plan in plans.items()
    }
    least, most = _TURNS
    if len(plans) == 1:
        most = least  # there is nothing to compare, so a rough figure is enough
    try:
        for name, plan in plans.items():
            if not slow:
                trial.seconds(plan, min(2, sizes[name]))
        for turn in range(most):
            for name, plan in plans.items():
                spent = time.perf_counter() - began
                enough = len(found[name]) >= (1 if slow else 2) and spent > 1.0
                if not enough and (turn < least or spent <= _ENOUGH):
                    found[name].append(trial.seconds(plan, sizes[name]))
    except RunError:
        if not found.get("loop"):
            if "loop" not in plans or len(plans) == 1:
                raise
            found["loop"] = [trial.seconds(Plan("loop"), 1)]
        return {"loop": min(found["loop"]) * 1e6}
    return {name: min(seconds) * 1e6 for name, seconds in found.items()}


def _trial_rows(name: str, plan: Plan, rows: int, step: float) -> int:
    """Return how many rows make a trial long enough to measure. A stack is as large as in the run, unless
    that takes too long."""
    if name == "loop":
        return max(1, min(rows, int(_LOOP / (_STEPS * step))))
    together = min(rows, plan.stack or plan.rows)
    return max(min(together, 2), min(together, int(_STACK / (_STEPS * step))))
