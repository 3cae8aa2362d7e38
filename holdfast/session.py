"""Start, resume and steer runs: directories and locks are taken, the plan is chosen and written down, the experiments are driven."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.config import Config
from holdfast.core.errors import ConfigError, HoldfastError, RunError
from holdfast.core.registry import load_plugin
from holdfast.engine.lockstep import Engine, Player, drive
from holdfast.engine.simulator import Simulator
from holdfast.experiment import Experiment, shared_samples
from holdfast.local.plan import Plan, on_threads
from holdfast.manifest import config_of, digest_of, folder_name, manifest_of, read_manifest, run_folders
from holdfast.planning import pick_device, plan_together, sentence

Say = Callable[[str], None]
MakeEngine = Callable[[Mapping[str, Plan], torch.device], Engine]
"""What carries out the exchanges of a run: the simulator, or a fleet of real clients."""


@dataclass
class Watch:
    """How a caller follows a run: `say` gets lines worth printing, `moved` is called as experiments go on."""

    say: Say = lambda line: None
    moved: Callable[[Experiment], None] = lambda experiment: None
    planned: Callable[[list[Experiment]], None] = lambda experiments: None


def start(
    cells: Sequence[tuple[str, Config]], out: Path, watch: Watch | None = None, plugins: Sequence[str] = (),
    engine: MakeEngine = Simulator,
) -> list[dict[str, Any]]:  # fmt: skip
    """Play new experiments together. One cell lives in `out` itself, several in folders below it."""
    watch = watch or Watch()
    samples = shared_samples([config for _, config in cells])
    single = len(cells) == 1
    experiments = [
        Experiment(config, out if single else out / folder_name(place, len(cells), label), label, store)
        for place, ((label, config), store) in enumerate(zip(cells, samples, strict=True))
    ]
    _refuse_taken(out)
    settings = experiments[0].config.engine
    if any(e.config.engine != settings for e in experiments):
        raise ConfigError("sweep: experiments that are played together share device, plan, memory and threads; do not sweep over engine")
    device = pick_device(settings.device)
    # before anything is written: a model that fails leaves nothing
    threads, forecasts = plan_together(experiments, device, settings.threads)
    for name, forecast in forecasts.items():
        watch.say(sentence(forecast, [e for e in experiments if e.cell.plan_key == name], threads))
    with on_threads(threads):
        fresh = [folder for folder in (out, *(e.out for e in experiments)) if not folder.exists()]
        with _locked(experiments), _tidied(experiments, fresh):
            _refuse_taken(out)  # somebody may have been quicker
            labels = [e.label for e in experiments]
            for experiment in experiments:
                plan = forecasts[experiment.cell.plan_key].plan
                experiment.store.write_json("manifest.json", manifest_of(experiment, plan, threads, device, labels, plugins))
            return _play(experiments, engine({name: f.plan for name, f in forecasts.items()}, device), device, watch)


def resume(
    out: Path, watch: Watch | None = None, device: str | None = None, plugins: Sequence[str] = (), engine: MakeEngine = Simulator,
    config: Config | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Continue what is in a directory, a run or a sweep, under the plan and threads it began with. A run that was given Python objects
    needs its config again."""
    watch = watch or Watch()
    folders = run_folders(out)
    if not folders:
        raise ConfigError(f"no run in {out}: it has no manifest.json")
    manifests = [read_manifest(folder) for folder in folders]
    if folders != [Path(out)]:
        _check_whole(out, manifests)
    for plugin in plugins:
        load_plugin(plugin)
    began = manifests[0]["device"]
    try:
        chosen = pick_device(device or began)
    except ConfigError as error:
        raise error if device else RunError(f"{out} began on {began}, which is not here; --device cpu continues, with other bits") from None
    if manifests[0].get("torch") != torch.__version__:
        watch.say(f"began under PyTorch {manifests[0].get('torch')}, continues under {torch.__version__}: the bits may differ")
    configs = [config_of(folder, manifest, config) for folder, manifest in zip(folders, manifests, strict=True)]
    samples = shared_samples(configs)
    experiments = [
        Experiment(config, folder, manifest["label"], store)
        for config, folder, manifest, store in zip(configs, folders, manifests, samples, strict=True)
    ]
    for experiment, manifest in zip(experiments, manifests, strict=True):
        if experiment.federation.digest != manifest["partition"]:
            raise RunError(f"{experiment.out}: the data has changed since the run began (its partition is another)")
        if digest_of(experiment.initial) != manifest["initial"]:
            raise RunError(f"{experiment.out}: the model does not start from the weights the run began with")
    plans = {e.cell.plan_key: Plan(**m["plan"]) for e, m in zip(experiments, manifests, strict=True)}
    if len(experiments) == 1 and len(manifests[0]["group"]) > 1:
        watch.say("a cell of a sweep, played on alone: on plan vmap its last bits may differ; resume the sweep's folder for the same bits")
    with on_threads(int(manifests[0]["threads"])), _locked(experiments):
        newest = max((head[0] for e in experiments if (head := e.store.head()) is not None), default=0)
        for experiment in experiments:
            experiment.store.catch_up(newest)
        return _play(experiments, engine(plans, chosen), chosen, watch)


def _check_whole(out: Path, manifests: list[dict[str, Any]]) -> None:
    """A folder of runs is continued as one only where it is one sweep, and all of it."""
    labels = [manifest["label"] for manifest in manifests]
    for manifest in manifests:
        if manifest["group"] != labels:
            raise ConfigError(f"the {len(labels)} runs in {out} are not one whole sweep; resume them one by one, or start again elsewhere")


def _refuse_taken(out: Path) -> None:
    """A directory holds one run or one sweep."""
    taken = [folder for folder in run_folders(out) if (folder / "head.json").exists()]
    if taken:
        raise ConfigError(f"{taken[0]} holds a run already; `holdfast resume {out}` continues it, or choose another --out")


def _play(experiments: list[Experiment], engine: Engine, device: torch.device, watch: Watch) -> list[dict[str, Any]]:
    watch.planned(experiments)
    by_cell = {id(e.cell): e for e in experiments}
    for experiment in experiments:
        experiment.network.module.to(device)
    players = [Player(e.cell, e.play()) for e in experiments]
    drive(engine, players, lambda player: watch.moved(by_cell[id(player.cell)]))
    failed = [player for player in players if player.error is not None]
    if not failed:
        return [player.result for player in players]
    first = failed[0].error
    assert first is not None
    if len(players) == 1:
        raise first
    reason = f"{first}" if isinstance(first, HoldfastError) else f"{type(first).__name__}: {first}"
    raise RunError(
        f"{len(failed)} of {len(players)} experiments failed, the others are finished: {failed[0].cell.label!r} in round "
        f"{failed[0].cell.round}: {reason}"
    ) from first


@contextmanager
def _locked(experiments: list[Experiment]) -> Iterator[None]:
    held: list[Experiment] = []
    try:
        for experiment in experiments:
            experiment.store.open()
            held.append(experiment)
        yield
    finally:
        for experiment in held:
            experiment.store.close()


@contextmanager
def _tidied(experiments: list[Experiment], fresh: list[Path]) -> Iterator[None]:
    """A start that fails before anything is committed (a full disk, say) leaves no new folder behind. Only inside the locks: a folder
    that another process holds is not ours to remove."""
    try:
        yield
    except BaseException:
        if not any((experiment.out / "head.json").exists() for experiment in experiments):
            for folder in fresh:
                shutil.rmtree(folder, ignore_errors=True)
        raise
