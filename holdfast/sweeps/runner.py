"""Run a sweep: the cells of a grid in lockstep, on one machine or divided over several. The same call starts,
continues or completes it.

Cells that begin together are a group, and stay one: on plan `vmap` the last bits of a cell depend on the
other cells in the stack. A group's plan, threads and device are written before it trains, so any process that
continues it, after any kill, gets the same bits. Finished cells are not built again. A cell that fails is
recorded with its reason, and the others continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from holdfast.core.errors import ConfigError, HoldfastError, InUse, RunError
from holdfast.core.registry import load_plugin
from holdfast.data.federation import Samples
from holdfast.data.handed.content import HandedOver
from holdfast.data.handed.kept import keep_all
from holdfast.data.lookup import check_folder
from holdfast.engine.ranks import alone_only
from holdfast.engine.simulator import Simulator
from holdfast.experiment.build import shared_samples
from holdfast.experiment.config import Config
from holdfast.experiment.extension import extend
from holdfast.experiment.loop import Experiment
from holdfast.experiment.manifest import is_sweep, manifest_of, read_manifest, warn_of_objects
from holdfast.experiment.planner import start_device
from holdfast.experiment.runner import (
    MakeEngine,
    RunCallbacks,
    RunTerms,
    agree,
    check_same,
    choose_device,
    run_together,
    say_torch,
)
from holdfast.storage.status import RunStatus, forget_failure, write_failure
from holdfast.storage.store import Store
from holdfast.sweeps.folder import CellFolder, Group, SweepFolder, read_sweep

LoadSamples = Callable[[list[Config]], list[Samples]]


class Launcher(Protocol):
    """Runs what is left of a sweep in other processes, of this machine or of several."""

    def run(self, task: Task, wanted: list[CellFolder], built: list[Experiment]) -> None: ...


@dataclass
class Task:
    """What this process has to do, and how."""

    folder: SweepFolder
    watch: RunCallbacks = field(default_factory=RunCallbacks)
    plugins: Sequence[str] = ()
    engine: MakeEngine = Simulator
    retry: bool = False
    device: str | None = None
    resuming: bool = False
    launcher: Launcher | None = None
    """What runs the cells; without it, this process does."""
    load: LoadSamples = shared_samples
    experiments: dict[str, Experiment] = field(default_factory=dict)
    """The cells that this process has locked, by folder name."""

    def open(self, places: Iterable[CellFolder]) -> list[CellFolder]:
        """Return the cells that are not finished."""
        statuses = [(place, place.run_status()) for place in places]
        return [
            place
            for place, status in statuses
            if not status.done
            or (self.retry and status.status == "failed")
            or (status.status != "failed" and place.to_extend())
        ]


def sweep(
    cells: Sequence[tuple[str, Config]],
    out: Path,
    watch: RunCallbacks | None = None,
    plugins: Sequence[str] = (),
    shard: tuple[int, int] = (1, 1),
    retry: bool = False,
    engine: MakeEngine = Simulator,
    launcher: Launcher | None = None,
) -> list[RunStatus]:
    """Run all that is left of a sweep, or of one shard of it, and return the status of every cell. A
    `launcher` runs it in other processes (launch.py)."""
    if engine is Simulator and not is_sweep(out):
        for _, config in cells:
            check_folder(config.data.dir)
    alone_only("a sweep")
    task = Task(SweepFolder(out, cells), watch or RunCallbacks(), plugins, engine, retry, launcher=launcher)
    check_shard(*shard)
    task.folder.check()
    mine = task.folder.shard(*shard)
    if not mine:
        task.watch.say(f"shard {shard[0]}/{shard[1]} is empty: the sweep has {len(cells)} cells")
    return run_cells(task, mine)


def resume_sweep(
    out: Path,
    watch: RunCallbacks | None = None,
    device: str | None = None,
    plugins: Sequence[str] = (),
    retry: bool = False,
    engine: MakeEngine = Simulator,
    data: Sequence[HandedOver] = (),
    rounds: int | None = None,
    launcher: Launcher | None = None,
) -> list[RunStatus]:
    """Continue a sweep from its directory alone: all cells that no other process has. `data` is what was
    handed over in Python, where the directory has no copy; `rounds` a new and higher number of rounds."""
    alone_only("a sweep")
    for plugin in plugins:
        load_plugin(plugin)
    if rounds is not None:
        SweepFolder(out, read_sweep(out, data)).extend(rounds)
    task = Task(
        SweepFolder(out, read_sweep(out, data)),
        watch or RunCallbacks(),
        plugins,
        engine,
        retry,
        device,
        resuming=True,
        launcher=launcher,
    )
    task.folder.check()
    return run_cells(task, task.folder.cells)


def results_of(statuses: Sequence[RunStatus]) -> list[dict[str, Any]]:
    """Return the results, if all experiments have one; otherwise raise an error."""
    failed = [run_status for run_status in statuses if run_status.status == "failed"]
    if failed:
        many = f"{len(failed)} of {len(statuses)} experiments failed"
        raise RunError(
            f"{many}, the others are finished: '{failed[0].label}' in round {failed[0].round}:"
            f" {failed[0].reason}"
        )
    elsewhere = [run_status for run_status in statuses if run_status.result is None]
    if elsewhere:
        raise RunError(
            f"{len(elsewhere)} of {len(statuses)} experiments are being run by another process, such as"
            f" '{elsewhere[0].label}'"
        )
    return [run_status.result for run_status in statuses if run_status.result is not None]


def run_cells(task: Task, mine: list[CellFolder]) -> list[RunStatus]:
    """Run what is left of some cells, and of the groups that they began in."""
    folder = task.folder
    wanted = _with_their_groups(task, task.open(mine))
    if wanted:
        if folder.groups():
            warn_of_objects(folder.path, wanted[0].config)
        if task.launcher is None:
            start_device(task.device or wanted[0].config.engine.device)
        samples = task.load([place.config for place in wanted])
        built = [_built(place, store) for place, store in zip(wanted, samples, strict=True)]
        if task.launcher is not None:
            task.launcher.run(task, wanted, built)
        else:
            with ExitStack() as locks:
                take(task, wanted, built, locks)
                _run(task)
    ours = {place.path for place in [*mine, *wanted]}
    return [_seen(place.run_status(), place.path in ours) for place in folder.cells]


def _built(place: CellFolder, samples: Samples) -> Experiment:
    try:
        return Experiment(place.config, place.path, place.label, samples)
    except HoldfastError as error:
        raise type(error)(f"{error} (in the sweep's cell '{place.label}')") from error


def _seen(run_status: RunStatus, mine: bool) -> RunStatus:
    """Mark the status: a cell that is not finished now belongs to another process."""
    return replace(
        run_status,
        mine=mine,
        shared="" if run_status.done else "running elsewhere" if mine else "other shard",
    )


def check_shard(number: int, of: int) -> None:
    if not 1 <= number <= of:
        raise ConfigError(f"shard {number}/{of}: shards are numbered from 1, as in 1/4 to 4/4")


def _with_their_groups(task: Task, places: list[CellFolder]) -> list[CellFolder]:
    """Add the other members of begun groups: a group is continued as a whole, also beyond this shard."""
    names = {place.path.name for place in places}
    for group in task.folder.groups():
        if names & set(group.cells):
            names |= {place.path.name for place in task.open(members_of(task, group))}
    return [place for place in task.folder.cells if place.path.name in names]


def take(task: Task, wanted: list[CellFolder], built: list[Experiment], locks: ExitStack) -> None:
    """Lock the cells that no other process has; only then is it known what is left of them."""
    with task.folder.claim():
        task.folder.write()
        if task.load is shared_samples:
            keep_all([place.config for place in wanted], task.folder.path, task.watch.say)
        for place, experiment in zip(wanted, built, strict=True):
            try:
                experiment.store.open()
            except InUse:
                continue
            if place.to_extend():
                extend(experiment.store, read_manifest(place.path), place.config.train.rounds)
            if task.open([place]):
                task.experiments[place.path.name] = experiment
                locks.callback(experiment.store.close)
            else:
                experiment.store.close()


def _run(task: Task) -> None:
    """Continue groups that have begun, each on its own terms; then begin the rest as one more group."""
    grouped: set[str] = set()
    for group in task.folder.groups():
        grouped |= set(group.cells)
        members = task.open(members_of(task, group))
        if members and all(place.path.name in task.experiments for place in members):
            _continue(task, group, members)
    fresh = [experiment for name, experiment in task.experiments.items() if name not in grouped]
    if fresh:
        _begin(task, fresh)


def members_of(task: Task, group: Group) -> list[CellFolder]:
    return [place for place in task.folder.cells if place.path.name in group.cells]


def _begin(task: Task, experiments: list[Experiment]) -> None:
    group = None
    try:
        able, terms = _agreed(task, experiments)
        if not able:
            return
        names = tuple(experiment.out.name for experiment in able)
        group = Group(names, terms.plans, terms.threads, terms.device, torch.__version__)
        task.folder.write_group(group)
        _write_manifests(task, group, able)
        run_together(able, terms, task.engine, task.watch)
    except BaseException:
        if not any((experiment.out / "head.json").exists() for experiment in experiments):
            task.folder.give_up([experiment.out for experiment in experiments], group)
        raise


def _agreed(task: Task, experiments: list[Experiment]) -> tuple[list[Experiment], RunTerms]:
    """Return the experiments that can be trained, and their terms. A network whose first trial fails is
    recorded and does not stop the others; if nothing of the sweep can begin, its error is raised instead."""
    device = task.device or experiments[0].config.engine.device
    for experiment in experiments:
        forget_failure(experiment.out)
    try:
        return experiments, agree(experiments, device, task.watch)
    except Exception as first:
        errors: dict[str, Exception] = {}
        for key in dict.fromkeys(experiment.run_context.plan_key for experiment in experiments):
            try:
                agree(
                    [experiment for experiment in experiments if experiment.run_context.plan_key == key],
                    device,
                    RunCallbacks(),
                )
            except Exception as error:
                errors[key] = error
        able = [experiment for experiment in experiments if experiment.run_context.plan_key not in errors]
        if not able and not task.folder.groups():
            raise first
    terms = agree(able, device, task.watch) if able else RunTerms((), 1, device)
    for experiment in experiments:
        if experiment.run_context.plan_key in errors:
            write_failure(experiment.out, 0, errors[experiment.run_context.plan_key])
            task.watch.say(f"{experiment.label} failed before its first round; the others continue")
    return able, terms


def _continue(task: Task, group: Group, members: list[CellFolder]) -> None:
    """Continue a group on its own terms. Failed cells that are retried run after the others, whose bits must
    not depend on them."""
    device = str(choose_device(task.folder.path, task.device, group.device))
    check_device(task, group, members)
    say_torch(group.torch, task.watch)
    experiments = [task.experiments[place.path.name] for place in members]
    _write_manifests(task, group, experiments)
    catch_up(task, group, experiments)
    plans = dict(zip(group.cells, group.plans, strict=True))
    failed = {place.path for place in members if place.run_status().status == "failed"}
    for chosen in (
        [e for e in experiments if e.out not in failed],
        [e for e in experiments if e.out in failed],
    ):
        if chosen:
            for experiment in chosen:
                forget_failure(experiment.out)
            run_together(
                chosen,
                RunTerms(tuple(plans[e.out.name] for e in chosen), group.threads, device),
                task.engine,
                task.watch,
            )


def check_device(task: Task, group: Group, members: list[CellFolder]) -> None:
    """Refuse to go on with a group on another device, unless the user resumes it there."""
    asked = members[0].config.engine.device
    if not task.resuming and asked != group.device:
        again = f"`holdfast resume {task.folder.path} --device {asked}` continues on {asked}, with other bits"
        raise ConfigError(
            f"{members[0].path} began on {group.device}, not on {asked}; give --device {group.device},"
            f" or {again}"
        )


def catch_up(task: Task, group: Group, experiments: list[Experiment]) -> None:
    """Bring the cells of a group to the same round, where a kill came between the renames of a commit."""
    rounds = {round for name in group.cells if (round := Store(task.folder.path / name).round()) is not None}
    for experiment in experiments:
        experiment.store.catch_up(rounds)


def _write_manifests(task: Task, group: Group, experiments: list[Experiment]) -> None:
    """Write manifests; if a kill came before one was written, the group's terms are still known."""
    plans = dict(zip(group.cells, group.plans, strict=True))
    labels = [place.label for place in members_of(task, group)]
    for experiment in experiments:
        if (experiment.out / "manifest.json").exists():
            check_same(experiment, read_manifest(experiment.out))
        else:
            plan = plans[experiment.out.name]
            manifest = manifest_of(
                experiment, plan, group.threads, group.device, labels, task.plugins, sweep=True
            )
            experiment.store.write_json("manifest.json", manifest)
