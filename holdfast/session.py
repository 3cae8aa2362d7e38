"""Start and resume: a run in its own directory, or a sweep. Directories and locks are taken, the plan is written down."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.config import Config
from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import load_plugin
from holdfast.damage import damage
from holdfast.engine.simulator import NEEDS_SAMPLES, Simulator
from holdfast.experiment import Experiment
from holdfast.local.plan import Plan
from holdfast.manifest import config_of, manifest_of, read_manifest, run_folders, warn_of_objects
from holdfast.playing import MakeEngine, Terms, Watch, agree, check_same, choose_device, play_together, say_torch
from holdfast.standing import forget_failure
from holdfast.sweep_folder import is_sweep
from holdfast.sweeping import results_of, resume_sweep, sweep

__all__ = ["Watch", "resume", "start"]


def start(
    cells: Sequence[tuple[str, Config]], out: Path, watch: Watch | None = None, plugins: Sequence[str] = (),
    engine: MakeEngine = Simulator,
) -> list[dict[str, Any]]:  # fmt: skip
    """Play one new experiment in `out`, or a sweep of several in folders below it; an experiment that fails raises its error."""
    watch = watch or Watch()
    if engine is Simulator and any(config.data.name == "declared" for _, config in cells):
        raise DataError(NEEDS_SAMPLES)  # before anything is written
    if len(cells) > 1:
        return results_of(sweep(cells, out, watch, plugins, engine=engine))
    ((label, config),) = cells
    experiment = Experiment(config, out, label)
    _refuse_taken(out)
    terms = agree([experiment], config.engine.device, watch)  # before anything is written: a model that fails leaves nothing
    fresh = not out.exists()
    with _locked(experiment), _tidied(out, fresh):
        _refuse_taken(out)  # somebody may have been quicker
        experiment.store.write_json(
            "manifest.json", manifest_of(experiment, terms.plans[0], terms.threads, terms.device, [experiment.label], plugins)
        )
        return [_play_one(experiment, terms, engine, watch)]


def resume(
    out: Path, watch: Watch | None = None, device: str | None = None, plugins: Sequence[str] = (), engine: MakeEngine = Simulator,
    config: Config | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Continue what is in a directory, a run or a sweep, under the plan and threads it began with. A run that was given Python objects
    needs its config again."""
    watch = watch or Watch()
    if is_sweep(out):
        return results_of(resume_sweep(out, watch, device, plugins, engine=engine))
    for plugin in plugins:
        load_plugin(plugin)
    if not (Path(out) / "manifest.json").exists() and run_folders(out):
        raise ConfigError(f"the runs in {out} are not a sweep; resume them one by one")
    manifest = read_manifest(out)
    terms = Terms((Plan(**manifest["plan"]),), int(manifest["threads"]), str(choose_device(out, device, manifest["device"])))
    say_torch(manifest.get("torch"), watch)
    experiment = Experiment(config_of(out, manifest, config), out, manifest["label"])
    check_same(experiment, manifest)
    if experiment.store.result() is None:
        warn_of_objects(out, experiment.config)
    if len(manifest["group"]) > 1:
        watch.say("a cell of a sweep, played on alone: on plan vmap its last bits, and those of the cells it was played with, may differ; "
                  "resume the sweep's folder for the same bits")  # fmt: skip
    with _locked(experiment):
        forget_failure(experiment.out)  # who names this one run wants it tried
        return [_play_one(experiment, terms, engine, watch)]


def _play_one(experiment: Experiment, terms: Terms, engine: MakeEngine, watch: Watch) -> dict[str, Any]:
    before = experiment.store.round()
    (player,) = play_together([experiment], terms, engine, watch, contain=False)
    if player.error is None:
        return player.result
    damaged = None if before is None or experiment.store.round() != before else damage(experiment.out, before, player.error)
    if damaged is None:
        raise player.error
    raise damaged from player.error  # before anything else was committed: what it was resumed from is at fault


def _refuse_taken(out: Path) -> None:
    """A directory holds one run or one sweep."""
    taken = [folder for folder in run_folders(out) if (folder / "head.json").exists()]
    if taken or is_sweep(out):
        there = taken[0] if taken else out
        raise ConfigError(f"{there} holds a run already; `holdfast resume {out}` continues it, or choose another --out")


@contextmanager
def _locked(experiment: Experiment) -> Iterator[None]:
    experiment.store.open()
    try:
        yield
    finally:
        experiment.store.close()


@contextmanager
def _tidied(out: Path, fresh: bool) -> Iterator[None]:
    """A start that fails before anything is committed (a full disk, say) leaves no new folder behind. Only inside the lock: a folder
    that another process holds is not ours to remove."""
    try:
        yield
    except BaseException:
        if fresh and not (out / "head.json").exists():
            shutil.rmtree(out, ignore_errors=True)
        raise
