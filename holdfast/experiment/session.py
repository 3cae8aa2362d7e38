"""Start and resume one run in its own directory, under its lock; the plan is written to the manifest."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from holdfast.core.columns import Ranks
from holdfast.core.errors import ConfigError
from holdfast.core.files import as_json
from holdfast.core.version import __version__
from holdfast.data.handed.content import HandedOver
from holdfast.data.handed.kept import keep_all
from holdfast.engine.distributed import by_ranks
from holdfast.engine.ranks import on_all, on_first
from holdfast.experiment.config import Config
from holdfast.experiment.extension import check_extension, extend, with_rounds
from holdfast.experiment.given_again import how_to_resume
from holdfast.experiment.loop import Experiment
from holdfast.experiment.manifest import (
    config_of,
    digest_of,
    is_sweep,
    manifest_of,
    read_manifest,
    run_folders,
    warn_of_objects,
)
from holdfast.experiment.object_names import first_difference
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
from holdfast.local.plan import Plan
from holdfast.storage.damage import damage
from holdfast.storage.status import forget_failure


def start_run(
    label: str,
    config: Config,
    out: Path,
    watch: RunCallbacks,
    plugins: Sequence[str],
    engine: MakeEngine,
    ranks: Ranks | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Run a new experiment in `out`; if it fails, its error is raised. Of several `ranks` that run it
    together, each has a `device` of its own, and the first writes the directory."""
    start_device(device or config.engine.device)
    experiment = on_all(ranks, lambda: Experiment(config, out, label, ranks=ranks))
    _check_alike(experiment, ranks)
    on_first(ranks, lambda: _refuse_taken(out))
    # before anything is written: a model that fails leaves nothing
    terms = on_all(ranks, lambda: agree([experiment], device or config.engine.device, watch, ranks is None))
    terms = terms if ranks is None else _of_first(ranks, terms)
    fresh = not out.exists()

    def begin() -> None:
        _refuse_taken(out)  # another process may have been faster
        keep_all([config], out, watch.say)
        manifest = manifest_of(
            experiment,
            terms.plans[0],
            terms.threads,
            config.engine.device if ranks else terms.device,
            [experiment.label],
            plugins,
        )
        experiment.store.write_json("manifest.json", manifest)

    with _locked(experiment, ranks), _tidied(out, fresh and not experiment.store.follows):
        on_first(ranks, begin)
        return _run_one(experiment, terms, engine, watch)


def _check_alike(experiment: Experiment, ranks: Ranks | None) -> None:
    """Refuse ranks that would run different experiments, or on different data."""
    if ranks is None:
        return
    mine = {
        "the version of Holdfast": __version__,
        "the version of PyTorch": torch.__version__,
        "the directory of the run": str(experiment.out.resolve()),
        "config": json.loads(as_json(experiment.config.plain())),
        "who holds which samples": experiment.federation.digest,
        "the samples": experiment.federation.samples.digest,
        "the first model": digest_of(experiment.initial),
    }
    mine["config"]["engine"].pop("device", None)
    said = ranks.agree(mine)
    for rank, other in enumerate(said):
        for name, value in other.items():
            if value != said[0][name]:
                what = name if name != "config" else first_difference(said[0][name], value)
                raise ConfigError(
                    f"ranks 0 and {rank} would run different experiments: they differ in {what}; start all"
                    " with the same command, data and versions"
                )


def _of_first(ranks: Ranks, terms: RunTerms) -> RunTerms:
    """The plan and threads that the first rank chose, since their bits must be the same; the device is this
    rank's own."""
    plan, threads = ranks.agree([asdict(terms.plans[0]), terms.threads])[0]
    return RunTerms((Plan(**plan),), threads, terms.device)


def resume_run(
    out: Path,
    watch: RunCallbacks,
    device: str | None,
    engine: MakeEngine,
    config: Config | None,
    data: Sequence[HandedOver] = (),
    rounds: int | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Continue a run under the plan and threads it began with, to its end or to more `rounds`. A run that was
    given Python objects needs its config again."""
    _refuse_comparison(out)
    if not (Path(out) / "manifest.json").exists() and run_folders(out):
        raise ConfigError(f"the runs in {out} are not a sweep; resume them one by one")
    manifest = read_manifest(out)

    def built() -> tuple[Experiment, str]:
        chosen = config_of(out, manifest, config, data)
        if rounds is not None:
            _check_alone(out, manifest)
            check_extension(out, chosen, rounds)
            chosen = with_rounds(chosen, rounds)
        found = str(choose_device(out, device, manifest["device"]))
        experiment = Experiment(chosen, out, manifest["label"], ranks=ranks)
        check_same(experiment, manifest)
        return experiment, found

    say_torch(manifest.get("torch"), watch)
    experiment, trains_on = on_all(ranks, built)
    _check_alike(experiment, ranks)
    terms = RunTerms((Plan(**manifest["plan"]),), int(manifest["threads"]), trains_on)
    if experiment.store.result() is None:
        warn_of_objects(out, experiment.config)
    if len(manifest["group"]) > 1:
        watch.say(
            "resuming one cell of a sweep alone: on plan vmap its last bits, and those of the cells it ran"
            " with, may differ; resume the sweep's folder for the same bits"
        )

    def begin() -> None:
        if rounds is not None:
            extend(experiment.store, manifest, rounds)
        forget_failure(experiment.out)  # a run that is named explicitly is tried again

    with _locked(experiment, ranks):
        on_first(ranks, begin)
        return _run_one(experiment, terms, engine, watch)


def _check_alone(out: Path, manifest: Mapping[str, Any]) -> None:
    if manifest.get("sweep"):
        raise ConfigError(
            f"rounds: {out} is a cell of a sweep, whose cells have the same number of rounds; extend"
            f" {Path(out).parent}"
        )


def _run_one(
    experiment: Experiment, terms: RunTerms, engine: MakeEngine, watch: RunCallbacks
) -> dict[str, Any]:
    before = experiment.store.round()
    share = experiment.run_context.share
    engine = engine if share is None else by_ranks(experiment.run_context)
    (driver,) = run_together([experiment], terms, engine, watch, contain=False)
    if driver.error is None:
        if share is not None:
            share.ranks.agree(None)  # now the first rank has written the result, which all may read
        return driver.result
    damaged = (
        None
        if before is None or experiment.store.round() != before
        else damage(experiment.out, before, driver.error)
    )
    if damaged is None:
        raise driver.error
    # nothing was committed since, so the state that it was resumed from is damaged
    raise damaged from driver.error


def _refuse_comparison(out: Path) -> None:
    if is_sweep(Path(out) / "trials"):
        raise ConfigError(
            f"{out} holds a fair comparison; the `holdfast tune` command that began it, with --out {out},"
            " continues it"
        )


def _refuse_taken(out: Path) -> None:
    """Refuse a directory that holds a run or a sweep already."""
    _refuse_comparison(out)
    taken = [folder for folder in run_folders(out) if (folder / "head.json").exists()]
    if taken or is_sweep(out):
        there = taken[0] if taken else out
        again = f"`holdfast resume {shlex.quote(str(out))}`"
        if out in taken:
            again = how_to_resume(out, read_manifest(out))
        raise ConfigError(f"{there} already holds a run; {again} continues it, or choose another --out")


@contextmanager
def _locked(experiment: Experiment, ranks: Ranks | None) -> Iterator[None]:
    def take() -> None:
        experiment.store.open()

    on_first(ranks, take)
    try:
        yield
    finally:
        experiment.store.close()


@contextmanager
def _tidied(out: Path, fresh: bool) -> Iterator[None]:
    """A start that fails before anything is committed (a full disk, say) leaves no new folder behind. Only
    inside the lock: a folder that another process holds is not ours to remove."""
    try:
        yield
    except BaseException:
        if fresh and not (out / "head.json").exists():
            shutil.rmtree(out, ignore_errors=True)
        raise
