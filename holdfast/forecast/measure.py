"""Measure a few rounds before a run, to forecast its cost. All cells are built, the plan is chosen as a run
would choose it, and a few real rounds are run (all clients of the round, server, evaluation, commit) in a
temporary folder beside the run's own. Only the local training is shortened (short_rounds.py)."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from holdfast.core.errors import ConfigError, RunError
from holdfast.core.files import plain_disk_errors
from holdfast.core.peak_memory import forget_peak, peak
from holdfast.experiment.config import Config
from holdfast.experiment.loop import Experiment
from holdfast.experiment.planner import client_steps, pick_device
from holdfast.experiment.runner import RunCallbacks
from holdfast.forecast.extrapolation import (
    Forecast,
    MeasuredRounds,
    Memory,
    forecast_disk,
    forecast_seconds,
    group_plans,
)
from holdfast.forecast.participation import expected_participation
from holdfast.forecast.short_rounds import ShortRoundEngine, shares
from holdfast.local.plan import Plan
from holdfast.sweeps.runner import sweep
from holdfast.sweeps.session import start

_LONGEST = 1.0  # seconds of training in one measured round
_ENOUGH = 3.0  # seconds of measuring after which no further round begins
_ROUNDS = (3, 13)  # at least: one to warm up, one short, one long
_NEVER = 10**9


class _Stage:
    """Follows the measured experiments and ends them in time."""

    def __init__(self, watch: RunCallbacks):
        self.watch, self.called = watch, time.perf_counter()
        self.engine: ShortRoundEngine | None = None
        self.experiments: list[Experiment] = []
        self.configs: list[Config] = []
        self.last, self.threads = 0, 1

    def make_engine(self, plans: Mapping[str, Plan], device: torch.device) -> ShortRoundEngine:
        self.engine = ShortRoundEngine(plans, device, new_round=self.new_round)
        return self.engine

    def planned(self, experiments: list[Experiment]) -> None:
        assert self.engine is not None
        self.experiments, self.configs, self.threads = (
            experiments,
            [e.config for e in experiments],
            torch.get_num_threads(),
        )
        steps = [
            (client_steps(e) / e.rounds, self.engine.plans[e.run_context.plan_key].microseconds or 0.0)
            for e in experiments
        ]
        self.engine.shares = shares(sum(count * micro for count, micro in steps) * 1e-6, _LONGEST)
        self._shorten(_ROUNDS[1], 1)

    def new_round(self, round: int) -> None:
        """Prepare a round; called at its first exchange. Experiments that are not evaluated in every round
        are evaluated in odd rounds, which train longer."""
        assert self.engine is not None
        if self.last:
            return  # the methods' finish
        least, most = _ROUNDS
        self.watch.say(f"measuring: short round {round} of at most {most}")
        if round >= most or (round >= least and time.perf_counter() - self.engine.began[1] > _ENOUGH):
            self.last = round
        self._shorten(self.last or most, round)

    def _shorten(self, rounds: int, round: int) -> None:
        for experiment, config in zip(self.experiments, self.configs, strict=True):
            every = 1 if config.evaluate.every == 1 or round % 2 else _NEVER
            evaluate = config.evaluate.model_copy(update={"every": every})
            train = config.train.model_copy(update={"rounds": rounds})
            experiment.config = config.model_copy(update={"evaluate": evaluate, "train": train})

    def seen(self) -> MeasuredRounds:
        engine = self.engine
        assert engine is not None
        rounds = [config.train.rounds for config in self.configs]
        participations = []
        for experiment, real in zip(self.experiments, rounds, strict=True):
            expected = expected_participation(experiment, max(real, self.last))
            if len(experiment.run_context.rows.place) > expected.live[self.last - 1]:
                expected = expected_participation(experiment, max(real, self.last), everyone=True)
            participations.append(expected)
        return MeasuredRounds(
            self.experiments,
            rounds,
            [config.evaluate.every for config in self.configs],
            self.last,
            engine.timed,
            engine.began,
            self.called,
            time.perf_counter(),
            participations,
            [engine.plans[e.run_context.plan_key] for e in self.experiments],
            self.threads,
        )


def forecast_cost(
    cells: Sequence[tuple[str, Config]],
    out: Path,
    watch: RunCallbacks | None = None,
    plugins: Sequence[str] = (),
    shard: tuple[int, int] = (1, 1),
) -> Forecast:
    """Forecast the cost of running these cells, or one shard of them, in `out`. Nothing is left behind."""
    device = pick_device(cells[0][1].engine.device)
    forget_peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    stage = _Stage(watch or RunCallbacks())
    with _folder_beside(out) as folder:
        _run(stage, cells, folder / out.name, plugins, shard)
        seen = stage.seen()
        seconds, kinds = forecast_seconds(seen)
        inside = [e.out for e in seen.experiments]
        others = [
            file
            for file in (folder / out.name).rglob("*")
            if file.is_file() and not any(cell in file.parents for cell in inside)
        ]
        disk = forecast_disk(seen, sum(file.stat().st_size for file in others), len(others))
    groups = group_plans(seen, kinds, device.type)
    labels = tuple(e.label for e in seen.experiments)
    steps = sum(kind.steps for kind in kinds if not kind.evaluation)
    return Forecast(str(device), labels, groups, steps, seconds, _memory(stage, device), disk)


def _run(
    stage: _Stage,
    cells: Sequence[tuple[str, Config]],
    folder: Path,
    plugins: Sequence[str],
    shard: tuple[int, int],
) -> None:
    watch = replace(stage.watch, planned=stage.planned, moved=lambda experiment: None, tell_cost=False)
    if len(cells) == 1 and not cells[0][0]:
        if shard != (1, 1):
            raise ConfigError("shard: there is no [sweep] section with a list, so there is nothing to divide")
        config = cells[0][1]
        start([(config.parts().method.name, config)], folder, watch, plugins, engine=stage.make_engine)
        return
    statuses = sweep(cells, folder, watch, plugins, shard, engine=stage.make_engine)
    failed = [run_status for run_status in statuses if run_status.status == "failed"]
    if failed:
        raise RunError(f"cell '{failed[0].label}' would fail in round {failed[0].round}: {failed[0].reason}")
    if not stage.experiments:
        raise ConfigError(f"shard {shard[0]}/{shard[1]} is empty: the sweep has {len(cells)} cells")


def _memory(stage: _Stage, device: torch.device) -> Memory:
    """Return the measured peak, plus what batch orders of full length need in addition."""
    engine = stage.engine
    assert engine is not None
    workers = max((plan.workers for plan in engine.plans.values()), default=1)
    more = max((span.work.more_on_host for span in engine.timed), default=0.0) * workers
    host = peak() + engine.workers_peak + int(more)
    if device.type != "cuda":
        return Memory(host, None)
    more = max((span.work.more_on_device for span in engine.timed), default=0.0)
    return Memory(host, torch.cuda.max_memory_allocated(device) + int(more))


@contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """Make a temporary folder on the file system that the run will be written to."""
    parent = next(folder for folder in out.absolute().parents if folder.is_dir())
    with plain_disk_errors(parent):
        folder = Path(tempfile.mkdtemp(prefix=".forecast-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
