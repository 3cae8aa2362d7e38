"""Choosing the device, the threads and a plan for each network before a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.engine.client_stack import joined_table
from holdfast.engine.workers import Pool, can_fork, usable_cores
from holdfast.experiment.config import parse_memory
from holdfast.experiment.loop import Experiment
from holdfast.local.device_trials import Trials, all_finished
from holdfast.local.plan import Where, bytes_per_row, on_threads
from holdfast.local.plan_choice import Forecast, choose, choosing

_ON_CPU = 2 * 10**9  # bytes for a stack by default
_SHARE = 0.8  # of what is free on a GPU
_BESIDE = 0.75  # of that, where the servers compute on it too
_REPLIES = 8  # what all clients of a round send may take one part in so many of a GPU
_CLEARLY = 0.9  # share of the time that more threads, or worker processes, may take to be chosen
_LONG = 4.0  # seconds of training from which workers are worth a trial
_BLOCK = 1 << 22  # bytes that are sent to a worker and back to see how long that takes


def pick_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"engine.device: '{name}' is not a device; write cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: '{name}' cannot train here; write cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device: no CUDA device is available here; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.device: there is no {name}; the last one is cuda:{torch.cuda.device_count() - 1}"
        )
    return device


def start_device(name: str) -> None:
    """Begin to start a GPU, which takes seconds, while data is decoded and experiments are built. What is
    wrong with it is said when it is used."""

    def start() -> None:
        with suppress(Exception):
            torch.zeros(1, device=name)

    if name.startswith("cuda"):
        threading.Thread(target=start, daemon=True).start()


def memory_bound(text: str, device: torch.device, server: Where = "host") -> int:
    """Bytes for a stack of training clients."""
    if text != "auto":
        return parse_memory(text)
    if device.type != "cuda":
        return _ON_CPU
    return int(torch.cuda.mem_get_info(device)[0] * _SHARE * (1.0 if server == "host" else _BESIDE))


def where_servers_compute(experiments: list[Experiment], device: torch.device) -> Where:
    """On the device that trains if what all clients of a round send fits there beside their training. It
    depends on the size of the device and not on what is free, since bits depend on it."""
    asked = experiments[0].config.engine.server
    if device.type == "cpu" or asked != "auto":
        return "device" if device.type != "cpu" and asked == "device" else "host"
    sent = sum(_cohort_size(e) * e.initial.numel() * e.initial.element_size() for e in experiments)
    fits = sent * _REPLIES <= torch.cuda.get_device_properties(device).total_memory
    return "device" if fits else "host"


@dataclass(frozen=True)
class _ThreadTrial:
    """A number of threads, and what trials with it measured for each network."""

    threads: int
    forecasts: dict[str, Forecast]

    def seconds(self) -> float:
        """Seconds of one step of a client of every network."""
        return sum(forecast.seconds(1) or 0.0 for forecast in self.forecasts.values())


def plan_together(
    experiments: list[Experiment], device: torch.device, asked: int | None, may_fork: bool = True
) -> tuple[int, dict[str, Forecast]]:
    """How many threads, and a plan for each network. Small tensors gain nothing from a second thread, and on
    a busy machine threads wait for each other, so one thread is taken unless more are clearly faster; beside
    a GPU, one for each of several experiments (engine/host_threads.py), and all for a single one; worker
    processes, which cost memory and can fail, where they are clearly faster than either and the run is long
    enough for it to matter, and if this process `may_fork`."""
    most, workers = torch.get_num_threads(), experiments[0].config.engine.workers
    if workers is not None and workers > 1:
        _check_workers(device, asked)
        if not may_fork:
            raise ConfigError(
                "engine.workers: several processes run this experiment already; leave it out, or start more"
                " of them"
            )
        return 1, _forecasts(experiments, device, workers)
    beside = most if len(experiments) == 1 else 1
    counts = [asked] if asked else [beside] if device.type != "cpu" else sorted({1, most})
    trials = [_trial(experiments, device, threads) for threads in counts]
    best = trials[-1] if trials[-1].seconds() < _CLEARLY * trials[0].seconds() else trials[0]
    cores = min(usable_cores(), most)
    if (
        workers == 1
        or device.type != "cpu"
        or not (may_fork and can_fork())
        or cores == 1
        or (asked or 1) > 1
        or _training_seconds(best, experiments) < _LONG
    ):
        return best.threads, best.forecasts
    try:
        shared = _ThreadTrial(1, _forecasts(experiments, device, cores))
    except (
        HoldfastError,
        RuntimeError,
    ):  # for example, PyTorch has started threads for a GPU, which a child process does not inherit
        return best.threads, best.forecasts
    # another job may have used the machine during the first trial, so one process is measured twice
    ahead = shared.seconds() / _CLEARLY
    faster = ahead < best.seconds() and ahead < _trial(experiments, device, best.threads).seconds()
    return (1, shared.forecasts) if faster else (best.threads, best.forecasts)


def _trial(experiments: list[Experiment], device: torch.device, threads: int) -> _ThreadTrial:
    with on_threads(threads):
        return _ThreadTrial(threads, _forecasts(experiments, device))


def _check_workers(device: torch.device, threads: int | None) -> None:
    if device.type != "cpu":
        raise ConfigError(f"engine.workers: worker processes train on the CPU, not on {device}; leave it out")
    if (threads or 1) > 1:
        raise ConfigError(
            f"engine.workers: each has one thread, but engine.threads is {threads}; leave one of them out"
        )
    if not can_fork():
        raise ConfigError("engine.workers: this system cannot fork processes; leave it out")


def _training_seconds(trial: _ThreadTrial, experiments: list[Experiment]) -> float:
    """Seconds of training in the whole run."""
    return sum(trial.forecasts[e.run_context.plan_key].seconds(client_steps(e)) or 0.0 for e in experiments)


def _forecasts(experiments: list[Experiment], device: torch.device, workers: int = 1) -> dict[str, Forecast]:
    """A plan for each network, tried on the data of its first experiment with as many rows as its largest
    group trains at once."""
    alike: dict[str, list[Experiment]] = {}
    for experiment in experiments:
        alike.setdefault(experiment.run_context.plan_key, []).append(experiment)
    server = where_servers_compute(experiments, device)
    memory = _memory(alike, device, server)
    shared: dict[str, Forecast] = {}
    trials: dict[str, Trials[Forecast]] = {}
    for name, members in alike.items():
        first = members[0]
        engine, run_context, groups = first.config.engine, first.run_context, _groups(members)
        data = joined_table([run_context.data(first.participation.clients)], device)
        given = (
            engine.plan,
            run_context.network,
            run_context.initial,
            run_context.federation.samples.on(device),
            data,
            run_context.recipe,
            -(-max(groups) // workers),
            memory[name] // workers,
            engine.precision,
            sum(client_steps(e) for e in members),
            groups,
        )
        if workers == 1:
            trials[name] = choosing(*given)
        else:
            shared[name] = _shared(partial(choose, *given), workers, first)
    found = all_finished(trials) if workers == 1 else shared
    return {name: replace(one, plan=replace(one.plan, server=server)) for name, one in found.items()}


def _groups(experiments: list[Experiment]) -> tuple[int, ...]:
    """Models that are trained at once by those that are fused, one number for each group of them."""
    groups: dict[tuple[object, ...], int] = {}
    for each in experiments:
        group = each.run_context.group("train")
        groups[group] = groups.get(group, 0) + _cohort_size(each) * each.rule.models_per_client
    return tuple(groups.values())


def _memory(alike: dict[str, list[Experiment]], device: torch.device, server: Where) -> dict[str, int]:
    """Bytes for each network's stacks. On a CPU they come and go; on a GPU programs keep theirs to the end,
    so each network has its share of the whole, by what its stacks would take."""
    bounds = {
        name: memory_bound(members[0].config.engine.memory, device, server) for name, members in alike.items()
    }
    if device.type == "cpu":
        return bounds
    wanted = {name: _row(members[0]) * sum(_groups(members)) for name, members in alike.items()}
    return {name: bounds[name] * wanted[name] // max(1, sum(wanted.values())) for name in alike}


def _row(experiment: Experiment) -> int:
    """Bytes of one model of a stack."""
    run_context = experiment.run_context
    run_context.network.module.to("cpu")  # where it may have been left on a GPU by an earlier trial
    return bytes_per_row(
        run_context.network,
        run_context.federation.samples.blank(run_context.network.dtype),
        run_context.recipe.batch_size,
        run_context.recipe.held(),
    )


def _shared(tried: Callable[[], Forecast], workers: int, experiment: Experiment) -> Forecast:
    """The same trial in all workers at once, as they will work, with the time that models take from process
    to process."""
    model, per_client = experiment.initial, experiment.rule.models_per_client
    pool = Pool(workers, lambda message: tried() if message is None else message)
    with closing(pool):
        found: list[Forecast] = list(pool.answers([lambda: None] * workers))
        block = model.expand(max(1, _BLOCK // (model.numel() * model.element_size())), -1)
        began = time.perf_counter()
        list(pool.answers([lambda: block]))
        travel = (time.perf_counter() - began) / (2 * len(block)) * 1e6  # microseconds of one model, one way
    common = [name for name in found[0].measured if all(name in forecast.measured for forecast in found)]
    # private models go there and back, an update comes back; the others wait meanwhile
    steps = max(1.0, client_steps(experiment) / (_cohort_size(experiment) * per_client * experiment.rounds))
    travels = travel * (2 * per_client - 1) / (per_client * steps)
    measured = {name: sum(f.measured[name] for f in found) / workers**2 + travels for name in common}
    best = min(found, key=lambda forecast: measured.get(forecast.plan.name, float("inf")))
    micro = measured.get(best.plan.name)
    bound = memory_bound(experiment.config.engine.memory, model.device)
    plan = replace(best.plan, workers=workers, memory=bound, microseconds=micro and round(micro, 2))
    return replace(best, plan=plan, measured=measured, memory=best.memory * workers)


def sentence(forecast: Forecast, experiments: list[Experiment], threads: int, cost: bool = True) -> str:
    """The plan that was chosen, in words. With `cost`, also what its trial says about the whole run."""
    plan = forecast.plan
    measured = ", ".join(f"{name} {micro:.0f} us" for name, micro in forecast.measured.items())
    seconds = forecast.seconds(sum(client_steps(e) for e in experiments))
    if seconds is None:
        return f"plan {plan.name} (nothing to train)"
    where = (
        f"{threads} thread{'s' if threads > 1 else ''}"
        if plan.workers == 1
        else f"{plan.workers} worker processes of 1 thread"
    )
    where += ", servers on the GPU" if plan.server == "device" else ""
    expect = (
        f"expect about {max(seconds, 0.1):.1f} s of training and {max(forecast.memory // 10**6, 1)} MB for a"
        " stack"
    )
    source = f"; {forecast.source}" if forecast.source else ""
    chosen = f"plan {plan.name}, {where} (per client step: {measured}{source})"
    return f"{chosen}; {expect}" if cost else chosen


def _cohort_size(experiment: Experiment) -> int:
    """Clients of a round, and the server's own data where a rule trains on it."""
    return experiment.participation.cohort_size() + ("root" in experiment.parts.aggregator.needs)


def client_steps(experiment: Experiment) -> float:
    """Steps of all clients' models over the whole run, as planned."""
    train, count = experiment.config.train, experiment.run_context.federation.train.counts.double()
    per_epoch = (count / train.batch_size).floor() if train.drop_last else (count / train.batch_size).ceil()
    steps = (
        float(train.local_steps)
        if train.local_steps is not None
        else float(per_epoch.mean()) * train.local_epochs
    )
    return steps * _cohort_size(experiment) * experiment.rule.models_per_client * train.rounds
