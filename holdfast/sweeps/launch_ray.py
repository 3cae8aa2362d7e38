"""A sweep on a Ray cluster: this process keeps the directory and its locks, hands units to the cluster, and
commits what comes back. No file system is shared."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import ConfigError
from holdfast.core.files import as_json
from holdfast.core.version import __version__
from holdfast.experiment.build import sample_key
from holdfast.experiment.loop import Experiment
from holdfast.sweeps.dispatch import Dispatch, Event, Limits
from holdfast.sweeps.folder import CellFolder, Group
from holdfast.sweeps.launch import (
    Failures,
    arrays_of,
    begin,
    facts_of,
    fail,
    failures_of,
    left_of,
    moved,
    plugin_files,
    refuse_objects,
    rounds_of,
    units_for,
)
from holdfast.sweeps.parcels import Files, of_folder, pack, unpack
from holdfast.sweeps.ray_executor import Need, Parcel, RayCluster, connected
from holdfast.sweeps.ray_task import Plugin, SentSamples
from holdfast.sweeps.receiving import Receiver
from holdfast.sweeps.runner import Task, catch_up, take
from holdfast.sweeps.units import Unit

INTERVAL = 30.0
"""Seconds between two times at which committed rounds come back."""


@dataclass
class RemoteCells:
    """Cells that are trained elsewhere, while this process has their locks."""

    task: Task
    experiments: dict[str, Experiment]
    before: Failures
    receiver: Receiver

    def told(self, unit: Unit, event: Event) -> None:
        if event["event"] == "files":
            for name in self.receiver.receive(unpack(event["files"]), unit.cells):
                moved(self.task, self.experiments[name])

    def left(self, unit: Unit) -> tuple[str, ...]:
        return left_of(self.experiments, unit, self.before)

    def rounds(self, unit: Unit) -> int:
        return rounds_of(self.experiments, unit)

    def ended(self, unit: Unit) -> None:
        self.give_up(unit, "its worker ended without finishing it")

    def give_up(self, unit: Unit, reason: str) -> None:
        for name in self.left(unit):
            fail(self.task, self.experiments[name], reason)


@dataclass(frozen=True)
class OnRay:
    """Runs a sweep on a Ray cluster: at an address, or one that is started for it on this machine."""

    address: str
    interval: float = INTERVAL
    limits: Limits = field(default_factory=Limits)

    def run(self, task: Task, wanted: list[CellFolder], built: list[Experiment]) -> None:
        refuse_objects(wanted)
        engine = wanted[0].config.engine
        if engine.device not in ("cpu", "cuda"):
            raise ConfigError(
                f"ray: engine.device is {engine.device}, but Ray chooses the GPU of each unit; write cuda"
            )
        with ExitStack() as stack:
            ray = stack.enter_context(connected(self.address))
            take(task, wanted, built, stack)
            experiments = dict(task.experiments)
            for group in task.folder.groups():
                members = [experiments[name] for name in group.cells if name in experiments]
                catch_up(task, group, members)
            _say_idle_gpus(ray, engine.device, task)
            shipping = _Shipping(task, experiments, self.interval, _sent_samples(ray, experiments))
            executor = RayCluster(ray, shipping.parcel, shipping.need(None))
            stack.enter_context(executor)
            units = units_for(task, experiments, executor.slots())
            if not units:
                return
            begin(task, experiments, units, executor.slots())
            receiver = Receiver(task.folder, experiments, shipping.own_plugins)
            cells = RemoteCells(task, experiments, failures_of(experiments), receiver)
            Dispatch(executor, units, cells, task.watch.say, self.limits).run()


class _Shipping:
    """What goes to a worker with each unit."""

    def __init__(
        self, task: Task, experiments: dict[str, Experiment], interval: float, samples: dict[str, SentSamples]
    ):
        self.task, self.interval, self.samples = task, interval, samples
        self.places = {place.path.name: place for place in task.folder.cells}
        self.digests = {
            name: (sample_key(experiment.config), experiment.federation.samples.digest)
            for name, experiment in experiments.items()
        }
        self.plugins = _read_plugins(plugin_files(task, experiments))
        self.own_plugins = {digest: path for (_, digest, _), path in self.plugins}
        """The files here, by their digest."""

    def need(self, group: Group | None) -> Need:
        """The CPUs that train, or one GPU and the threads beside it. What has begun keeps its threads."""
        engine = self.task.folder.cells[0].config.engine
        threads = (engine.threads or 1) if group is None else group.threads
        workers = (engine.workers or 1) if group is None else max(plan.workers for plan in group.plans)
        return Need(threads * workers, 0 if engine.device == "cpu" else 1)

    def parcel(self, unit: Unit) -> Parcel:
        """A unit with its committed rounds as of now, so that a unit that was lost goes on from there."""
        folder = self.task.folder
        groups = [group for group in folder.groups() if set(group.cells) & set(unit.cells)]
        names = set(unit.cells).union(*(group.cells for group in groups))
        listed = [place for name, place in self.places.items() if name in names]
        files: Files = {"sweep.json": as_json(folder.described(listed))}
        for group in groups:
            files |= of_folder(folder.path, (), folder.group_file(group.cells))
        files |= of_folder(folder.path, unit.cells, None)
        for name in names - set(unit.cells):  # finished: a worker only has to know that
            files |= _ended(folder.path, name)
        need = self.need(groups[0] if groups else None)
        spec = {
            "cells": list(unit.cells),
            "retry": self.task.retry,
            "samples": [list(self.digests[name]) for name in unit.cells],
            "interval": self.interval,
            "cores": need.cpus,
            "holdfast": __version__,
            "torch": torch.__version__,
        }
        digests = {self.digests[name][1] for name in unit.cells}
        samples = [self.samples[digest] for digest in sorted(digests)]
        return Parcel(spec, pack(files), [plugin for plugin, _ in self.plugins], samples, need)


def _ended(folder: Path, name: str) -> Files:
    files = {f"{name}/{file}": folder / name / file for file in ("result.json", "failure.json")}
    return {file: path.read_bytes() for file, path in files.items() if path.exists()}


def _read_plugins(files: list[str]) -> list[tuple[Plugin, str]]:
    found: dict[str, tuple[Plugin, str]] = {}
    for file in files:
        path = Path(file).resolve()
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        found[digest] = (path.name, digest, content), str(path)
    return list(found.values())


def _sent_samples(ray: Any, experiments: dict[str, Experiment]) -> dict[str, SentSamples]:
    """Put the samples into the object store, each once; a machine that has them already fetches nothing."""
    found: dict[str, SentSamples] = {}
    for experiment in experiments.values():
        samples = experiment.federation.samples
        if samples.digest not in found:
            arrays = [(name, ray.put(array)) for name, array in arrays_of(samples).items()]
            found[samples.digest] = samples.digest, json.dumps(facts_of(samples)), arrays
    return found


def _say_idle_gpus(ray: Any, device: str, task: Task) -> None:
    gpus = int(sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]))
    if device == "cpu" and gpus:
        task.watch.say(
            f"the cluster has {gpus} GPUs that this sweep does not use; --device cuda trains there"
        )
