"""Choose a plan by trying: two steps of each on the real data, and say what the run will take."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from holdfast.core.keys import Key
from holdfast.data.federation import Padded, Samples
from holdfast.local.fit import Recipe, fit
from holdfast.local.plan import Plan, PlanName, bounded, bytes_per_row
from holdfast.models.network import Network

_STEPS = 2
_TRIES = 3
_LOOP_ROWS = 2  # enough to time a step of plan `loop`, which takes one row after the other


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
    sample = samples.batch(torch.zeros(1, dtype=torch.int64, device=data.rows.device), dtype=network.dtype)[0]
    network.module.to(data.rows.device)
    per_row = bytes_per_row(network, sample, recipe.batch_size)
    plans = {name: bounded(Plan(cast(PlanName, name)), memory, per_row) for name in ("loop", "vmap")}
    names = ("loop", "vmap") if asked == "auto" else (asked,)
    if int(data.count.max()) == 0:
        return Forecast(plans[names[0]], {}, 0)
    times = {}
    for name in names:
        stack = _LOOP_ROWS if name == "loop" else min(rows, plans[name].rows)
        times[name] = _time(network, initial, samples, data, recipe, plans[name], stack)
    best = min(times, key=lambda name: times[name])
    plan = replace(plans[best], microseconds=round(times[best], 2))
    return Forecast(plan, times, per_row * (1 if best == "loop" else min(rows, plan.rows)))


def _time(network: Network, initial: Tensor, samples: Samples, data: Padded, recipe: Recipe, plan: Plan, rows: int) -> float:
    """Microseconds per client step, the best of a few tries after a first one to warm up."""
    busiest = data.count.argsort(descending=True)[torch.arange(rows) % int((data.count > 0).sum())].cpu()
    where = busiest.to(data.rows.device)
    stack = Padded(data.rows[where], data.labels[where], data.count[busiest])
    model, key = initial.to(data.rows.device).expand(rows, -1), Key(0).fold(torch.arange(rows))
    trial = replace(recipe, steps=_STEPS, lr=1e-6, momentum=0.0, weight_decay=0.0, drop_last=False)
    best = float("inf")
    for _ in range(_TRIES + 1):
        started = time.perf_counter()
        fit(network, model, samples, stack, key, trial, plan)
        best = min(best, time.perf_counter() - started)
    return best / (rows * _STEPS) * 1e6
