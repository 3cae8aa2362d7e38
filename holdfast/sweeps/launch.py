"""A sweep in other processes: on the devices of this machine, or on a Ray cluster. Both cut the sweep into
units (units.py) and hand these out (dispatch.py)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.core.errors import ConfigError, InUse, RunError
from holdfast.data.handed.kept import is_missing
from holdfast.data.samples import Samples
from holdfast.data.shipped import FACTS, keep
from holdfast.experiment.build import sample_key
from holdfast.experiment.loop import Experiment
from holdfast.experiment.manifest import plugins_of
from holdfast.experiment.object_names import unnamed
from holdfast.storage.status import FAILURE, run_status, write_failure
from holdfast.storage.store import Store
from holdfast.sweeps.device_processes import DeviceProcesses, Job, cores_each, device_names
from holdfast.sweeps.dispatch import Dispatch, Event, Limits
from holdfast.sweeps.folder import CellFolder
from holdfast.sweeps.runner import Task, check_device, members_of, take
from holdfast.sweeps.units import Unit, units_of

Failures = dict[str, bytes]
"""The failure.json of cells, by folder name."""


@dataclass
class DirectCells:
    """Cells that workers train in the directory of the sweep, under their own locks."""

    task: Task
    experiments: dict[str, Experiment]
    before: Failures

    def told(self, unit: Unit, event: Event) -> None:
        experiment = self.experiments.get(event.get("cell", ""))
        if event["event"] == "moved" and experiment is not None:
            moved(self.task, experiment, int(event["round"]))

    def left(self, unit: Unit) -> tuple[str, ...]:
        return left_of(self.experiments, unit, self.before)

    def rounds(self, unit: Unit) -> int:
        return rounds_of(self.experiments, unit)

    def ended(self, unit: Unit) -> None:
        for name in unit.cells:
            moved(self.task, self.experiments[name])

    def give_up(self, unit: Unit, reason: str) -> None:
        for name in self.left(unit):
            store = Store(self.experiments[name].out)
            try:
                store.open()
            except InUse:  # another process trains it
                continue
            try:
                fail(self.task, self.experiments[name], reason)
            finally:
                store.close()


def moved(task: Task, experiment: Experiment, round: int | None = None) -> None:
    """A cell has committed a round in another process; tell who follows the sweep."""
    store = experiment.store
    committed = store.round() if round is None else round
    store.committed = max(store.committed, -1 if committed is None else committed)
    if experiment.finished is None and (result := store.result()) is not None:
        experiment.finished = result | {"run_dir": str(experiment.out)}
    task.watch.moved(experiment)


def failures_of(experiments: dict[str, Experiment]) -> Failures:
    """What is recorded of cells that failed before, and are tried again."""
    files = {name: experiment.out / FAILURE for name, experiment in experiments.items()}
    return {name: file.read_bytes() for name, file in files.items() if file.exists()}


def left_of(experiments: dict[str, Experiment], unit: Unit, before: Failures) -> tuple[str, ...]:
    """The cells that are not finished; one that failed before is, once it has failed again."""
    chosen = {name: experiments[name] for name in unit.cells}
    now = failures_of(chosen)
    return tuple(
        name
        for name, one in chosen.items()
        if not run_status(one.out, one.label).done or name in now and now[name] == before.get(name)
    )


def rounds_of(experiments: dict[str, Experiment], unit: Unit) -> int:
    return sum(1 + (-1 if (r := experiments[name].store.round()) is None else r) for name in unit.cells)


def fail(task: Task, experiment: Experiment, reason: str) -> None:
    """Record that a cell cannot go on. Nothing tries it again unless the user asks for it."""
    round = experiment.store.round() or 0
    experiment.out.mkdir(parents=True, exist_ok=True)
    write_failure(experiment.out, round, RunError(reason))
    task.watch.say(f"{experiment.label} failed after round {round}: {reason}; the others go on")


def refuse_objects(wanted: list[CellFolder]) -> None:
    """Other processes make the parts of an experiment from their names."""
    for place in wanted:
        if objects := unnamed(place.config.plain()):
            raise ConfigError(
                f"sweep: {objects[0]} is a Python object, which another process cannot have; register it"
                " in a file that --plugin or holdfast.load_plugin names, or sweep on one device"
            )


def plugin_files(task: Task, experiments: dict[str, Experiment]) -> list[str]:
    """The plug-ins that another process needs: those that were named, and those that parts come from."""
    files = {str(Path(file).resolve()) for file in task.plugins}
    for experiment in experiments.values():
        files |= plugins_of(experiment.parts, experiment.config.data)
    return sorted(files)


def units_for(task: Task, experiments: dict[str, Experiment], slots: int) -> list[Unit]:
    """The units of these cells. A group of which another process has a cell is left to that process."""
    groups = task.folder.groups()
    able = dict(experiments)
    for group in groups:
        members = task.open(members_of(task, group))
        if all(place.path.name in experiments for place in members):
            if members:
                check_device(task, group, members)
        else:
            for name in group.cells:
                able.pop(name, None)
    return units_of(list(able.values()), groups, slots)


@dataclass(frozen=True)
class OnDevices:
    """Runs a sweep in one process for each device of this machine."""

    devices: str
    limits: Limits = field(default_factory=Limits)

    @property
    def kind(self) -> str:
        """What the cells are trained on, as engine.device names it."""
        return self.names()[0].partition(":")[0]

    def names(self) -> list[str]:
        return device_names(self.devices, _gpus)

    def run(self, task: Task, wanted: list[CellFolder], built: list[Experiment]) -> None:
        refuse_objects(wanted)
        with ExitStack() as locks:  # only to see which cells no other process has
            take(task, wanted, built, locks)
        experiments = dict(task.experiments)
        names = self.names()
        units = units_for(task, experiments, len(names))
        if not units:
            return
        engine, samples = wanted[0].config.engine, _handed(built)
        plugins = plugin_files(task, experiments)

        def job(unit: Unit) -> Job:
            return {
                "folder": str(task.folder.path.absolute()),
                "cells": list(unit.cells),
                "plugins": plugins,
                "retry": task.retry,
                "samples": samples,
                "cache": None,
                "outbox": None,
                "scratch": None,
                "interval": 0.0,
            }

        cores = (engine.threads or 1) if engine.threads else cores_each(len(names))
        begin(task, experiments, units, len(names))
        with DeviceProcesses(names[: len(units)], job, cores) as executor:
            Dispatch(
                executor,
                units,
                DirectCells(task, experiments, failures_of(experiments)),
                task.watch.say,
                self.limits,
            ).run()


def begin(task: Task, experiments: dict[str, Experiment], units: list[Unit], slots: int) -> None:
    """Show one progress display for all cells."""
    cells = sum(len(unit.cells) for unit in units)
    task.watch.say(f"{cells} cells in {len(units)} units on {slots} devices")
    chosen = [experiments[name] for unit in units for name in unit.cells]
    for experiment in chosen:
        experiment.store.committed = -1 if (round := experiment.store.round()) is None else round
    order = list(experiments)
    task.watch.planned(sorted(chosen, key=lambda experiment: order.index(experiment.out.name)))


def _handed(built: list[Experiment]) -> list[list[str]]:
    """Put samples into the cache, where the processes find them, if some were handed over in Python and have
    no copy in the directory. Otherwise each process reads the data itself."""
    if not any(is_missing(experiment.config.plain(), experiment.out) for experiment in built):
        return []
    digests: dict[str, str] = {}
    for experiment in built:
        samples = experiment.federation.samples
        if digests.setdefault(sample_key(experiment.config), samples.digest) == samples.digest:
            keep(samples.digest, facts_of(samples), partial(arrays_of, samples))
    return [[key, digest] for key, digest in digests.items()]


def facts_of(samples: Samples) -> dict[str, Any]:
    return {name: getattr(samples, name) for name in FACTS}


def arrays_of(samples: Samples) -> dict[str, np.ndarray]:
    found = {"x": samples.x, "y": samples.y, "user": samples.user}
    return {name: tensor.cpu().numpy() for name, tensor in found.items() if tensor is not None}


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
