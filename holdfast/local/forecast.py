"""Choose a plan by trying: two steps of each on the real data, and say what the run will take."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError, RunError
from holdfast.core.keys import Key
from holdfast.data.federation import Padded, Samples
from holdfast.local.fit import Recipe, fit
from holdfast.local.plan import Plan, PlanName, bounded, bytes_per_row
from holdfast.models.network import Network

_STEPS = 2
_ENOUGH = 0.5  # seconds of trials after which a choice is sound
_TURNS = (3, 12)  # at least and at most, while they last less than a second in all
_LOOP, _STACK = 0.03, 0.3  # seconds that one trial of a plan should take: rows are added until it does
_SLOW = 0.1  # seconds of a step
_CLEARLY = 0.95  # vmap has to be this much faster: near a tie the simpler plan, which a real client runs too


@dataclass(frozen=True)
class Forecast:
    """The chosen plan, the measured microseconds of a client's step under each plan, and the expected memory of a stack."""

    plan: Plan
    measured: dict[str, float]
    memory: int

    def seconds(self, client_steps: float) -> float | None:
        micro = self.measured.get(self.plan.name)
        return None if micro is None else micro * client_steps * 1e-6


def choose(
    asked: str, network: Network, initial: Tensor, samples: Samples, data: Padded, recipe: Recipe, rows: int, memory: int
) -> Forecast:
    """`asked` is a plan's name or auto; `rows` is how many models a round trains at once. Auto takes the faster plan."""
    device = data.rows.device
    sample = samples.batch(torch.zeros(1, dtype=torch.int64, device=device), dtype=network.dtype)[0]
    network.module.to(device)
    per_row = bytes_per_row(network, sample, recipe.batch_size)
    plans = {name: bounded(Plan(cast(PlanName, name)), memory, per_row, device) for name in ("loop", "vmap")}
    names = [asked] if asked != "auto" else ["loop"] if plans["vmap"].stack == 1 else ["loop", "vmap"]
    if int(data.count.max()) == 0:
        return Forecast(plans[names[0]], {}, 0)
    times = _compare({name: plans[name] for name in names}, _Trial(network, initial, samples, data, recipe), rows)
    best = "vmap" if "loop" not in times or times.get("vmap", float("inf")) < _CLEARLY * times["loop"] else "loop"
    plan = replace(plans[best], microseconds=round(times[best], 2))
    held = min(rows, plan.rows)
    together = 1 if best == "loop" else min(held, plan.stack or held)
    waiting = 6 * initial.numel() * initial.element_size()  # a row before or after its turn: its models and what it sends
    return Forecast(plan, times, per_row * together + waiting * (held - together))


@dataclass(frozen=True)
class _Trial:
    """A few steps of the busiest clients."""

    network: Network
    initial: Tensor
    samples: Samples
    data: Padded
    recipe: Recipe

    def seconds(self, plan: Plan, rows: int) -> float:
        """Of one client's step."""
        data = self.data
        busiest = data.count.argsort(descending=True)[torch.arange(rows) % int((data.count > 0).sum())].cpu()
        where = busiest.to(data.rows.device)
        stack = Padded(data.rows[where], data.labels[where], data.count[busiest])
        model, key = self.initial.to(data.rows.device).expand(rows, -1), Key(0).fold(torch.arange(rows))
        trial = replace(self.recipe, steps=_STEPS, lr=1e-6, momentum=0.0, weight_decay=0.0, drop_last=False)
        started = time.perf_counter()
        try:
            fit(self.network, model, self.samples, stack, key, trial, plan)
        except HoldfastError:
            raise
        except Exception as error:  # the first time that a user's module and loss are run at all
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            raise RunError(f"model: a first step on plan {plan.name} failed: {type(error).__name__}: {reason}") from error
        return (time.perf_counter() - started) / (rows * _STEPS)


def _compare(plans: dict[str, Plan], trial: _Trial, rows: int) -> dict[str, float]:
    """Microseconds of a client's step under each plan. They take turns and the best turn counts, because another process may
    slow any of them; a model of which one step takes long is tried on few rows and in few turns. Where there is a choice, a plan that
    cannot run the model (vmap knows no LSTM) is no candidate."""
    began = time.perf_counter()
    step = trial.seconds(Plan("loop"), 1)
    slow = step > _SLOW
    best = {"loop": step} if slow and "loop" in plans else {}  # a first try warms up as well, which only short steps feel
    sizes = {name: _trial_rows(name, plan, rows, step if slow else trial.seconds(Plan("loop"), 1)) for name, plan in plans.items()}
    least, most = _TURNS
    for turn in range(most):
        for name, plan in plans.items():
            spent = time.perf_counter() - began
            if name in best and (spent > 1.0 or (turn >= least and spent > _ENOUGH)):
                continue
            try:
                best[name] = min(best.get(name, float("inf")), trial.seconds(plan, sizes[name]))
            except RunError:
                if "loop" not in best:
                    raise
                return {"loop": best["loop"] * 1e6}
    return {name: seconds * 1e6 for name, seconds in best.items()}


def _trial_rows(name: str, plan: Plan, rows: int, step: float) -> int:
    """As many rows as make a trial long enough to measure; a stack is as large as the run's unless that takes too long."""
    if name == "loop":
        return max(1, min(rows, int(_LOOP / (_STEPS * step))))
    together = min(rows, plan.stack or plan.rows)
    return max(min(together, 2), min(together, int(_STACK / (_STEPS * step))))
