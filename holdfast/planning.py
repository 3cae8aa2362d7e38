"""Before a run: which device, how many threads, which plan for each network, and what that will take."""

from __future__ import annotations

import torch

from holdfast.config import parse_memory
from holdfast.core.errors import ConfigError
from holdfast.engine.simulator import Simulator
from holdfast.experiment import Experiment
from holdfast.local.forecast import Forecast, choose
from holdfast.local.plan import on_threads

_ON_CPU = 2 * 10**9  # bytes for a stack, where nothing else is asked for
_SHARE = 0.8  # of what is free on a GPU
_CLEARLY = 0.9  # how much faster more threads have to be


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
        raise ConfigError(f"engine.device: there is no {name}; the last one is cuda:{torch.cuda.device_count() - 1}")
    return device


def memory_bound(text: str, device: torch.device) -> int:
    """Bytes for a stack of training clients."""
    if text != "auto":
        return parse_memory(text)
    return int(torch.cuda.mem_get_info(device)[0] * _SHARE) if device.type == "cuda" else _ON_CPU


def plan_together(experiments: list[Experiment], device: torch.device, asked: int | None) -> tuple[int, dict[str, Forecast]]:
    """How many threads, and a plan for each network. Small tensors gain nothing from a second thread, and on a busy machine threads
    wait for each other, so one thread is taken unless more are clearly faster."""
    most = torch.get_num_threads()
    tried: dict[int, dict[str, Forecast]] = {}
    for threads in [asked or most] if asked or device.type != "cpu" else sorted({1, most}):
        with on_threads(threads):
            tried[threads] = _forecasts(experiments, device)

    def seconds(threads: int) -> float:
        return sum(forecast.seconds(1) or 0.0 for forecast in tried[threads].values())

    best = min(tried)
    return (most, tried[most]) if most in tried and seconds(most) < _CLEARLY * seconds(best) else (best, tried[best])


def _forecasts(experiments: list[Experiment], device: torch.device) -> dict[str, Forecast]:
    """A plan for each network, tried on the data of its first experiment with as many rows as all its experiments train at once."""
    out: dict[str, Forecast] = {}
    for experiment in experiments:
        alike = [e for e in experiments if e.cell.plan_key == experiment.cell.plan_key]
        if experiment.cell.plan_key in out:
            continue
        engine, cell = experiment.config.engine, experiment.cell
        simulator = Simulator({}, device)
        rows = sum(_cohort_size(e) * e.rule.models_per_client for e in alike)
        data = simulator.table([cell.data(experiment.roster.clients)])
        forecast = choose(
            engine.plan, cell.network, cell.initial, cell.federation.samples.on(device), data, cell.recipe, rows,
            memory_bound(engine.memory, device), engine.precision,
        )  # fmt: skip
        out[experiment.cell.plan_key] = forecast
    return out


def sentence(forecast: Forecast, experiments: list[Experiment], threads: int) -> str:
    plan = forecast.plan
    measured = ", ".join(f"{name} {micro:.0f} us" for name, micro in forecast.measured.items())
    seconds = forecast.seconds(sum(client_steps(e) for e in experiments))
    if seconds is None:
        return f"plan {plan.name} (nothing to train)"
    where = f"{threads} thread{'s' if threads > 1 else ''}"
    expect = f"expect about {max(seconds, 0.1):.1f} s of training and {max(forecast.memory // 10**6, 1)} MB for a stack"
    return f"plan {plan.name}, {where} (per client step: {measured}); {expect}"


def _cohort_size(experiment: Experiment) -> int:
    return experiment.roster.cohort_size()


def client_steps(experiment: Experiment) -> float:
    """Steps of all clients' models over the whole run, as planned."""
    train, count = experiment.config.train, experiment.cell.federation.train.counts.double()
    per_epoch = (count / train.batch_size).floor() if train.drop_last else (count / train.batch_size).ceil()
    steps = float(train.local_steps) if train.local_steps is not None else float(per_epoch.mean()) * train.local_epochs
    return steps * _cohort_size(experiment) * experiment.rule.models_per_client * train.rounds
