"""Start, resume and steer runs: directories and locks are taken, the plan is chosen and written down, the experiments are driven."""

from __future__ import annotations

import datetime
import hashlib
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast import __version__
from holdfast.config import Config, make_config, parse_memory, unnamed
from holdfast.core.errors import ConfigError, HoldfastError, RunError, UnknownPart
from holdfast.core.registry import load_plugin, plugin_of
from holdfast.engine.lockstep import Engine, Player, drive
from holdfast.engine.simulator import Simulator
from holdfast.experiment import Experiment, shared_samples
from holdfast.local.forecast import Forecast, choose
from holdfast.local.plan import Plan, on_threads
from holdfast.store import read_json

_CLEARLY = 0.9  # how much faster more threads have to be
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
        Experiment(config, out if single else out / _folder(place, len(cells), label), label, store)
        for place, ((label, config), store) in enumerate(zip(cells, samples, strict=True))
    ]
    _refuse_taken(out)
    settings = experiments[0].config.engine
    if any(e.config.engine != settings for e in experiments):
        raise ConfigError("sweep: experiments that are played together share device, plan, memory and threads; do not sweep over engine")
    device = pick_device(settings.device)
    threads, forecasts = _tried(experiments, device, settings.threads)  # before anything is written: a model that fails leaves nothing
    for name, forecast in forecasts.items():
        watch.say(_sentence(forecast, [e for e in experiments if e.cell.plan_key == name], threads))
    with on_threads(threads):
        fresh = [folder for folder in (out, *(e.out for e in experiments)) if not folder.exists()]
        with _locked(experiments), _tidied(experiments, fresh):
            _refuse_taken(out)  # somebody may have been quicker
            labels = [e.label for e in experiments]
            for experiment in experiments:
                plan = forecasts[experiment.cell.plan_key].plan
                experiment.store.write_json("manifest.json", _manifest(experiment, plan, threads, device, labels, plugins))
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
        if _digest(experiment.initial) != manifest["initial"]:
            raise RunError(f"{experiment.out}: the model does not start from the weights the run began with")
    plans = {e.cell.plan_key: Plan(**m["plan"]) for e, m in zip(experiments, manifests, strict=True)}
    if len(experiments) == 1 and len(manifests[0]["group"]) > 1:
        watch.say("a cell of a sweep, played on alone: on plan vmap its last bits may differ; resume the sweep's folder for the same bits")
    with on_threads(int(manifests[0]["threads"])), _locked(experiments):
        newest = max((head[0] for e in experiments if (head := e.store.head()) is not None), default=0)
        for experiment in experiments:
            experiment.store.catch_up(newest)
        return _play(experiments, engine(plans, chosen), chosen, watch)


def run_folders(out: Path) -> list[Path]:
    """The runs in a directory: itself, or its folders."""
    out = Path(out)
    if (out / "manifest.json").exists():
        return [out]
    return sorted(file.parent for file in out.glob("*/manifest.json"))


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_json(folder / "manifest.json")
    if manifest is None:
        raise ConfigError(f"no run in {folder}: it has no manifest.json")
    expected = {"config": dict, "plan": dict, "threads": int, "device": str, "label": str, "group": list, "partition": str, "initial": str}
    broken = [name for name, kind in expected.items() if not isinstance(manifest.get(name), kind)]
    if broken or manifest["plan"].keys() - Plan.__dataclass_fields__.keys():
        raise RunError(f"{folder / 'manifest.json'} is damaged: '{broken[0] if broken else 'plan'}' cannot be read")
    return manifest


def config_of(folder: Path, manifest: Mapping[str, Any], given: Config | None = None) -> Config:
    """The config a run began with: from its manifest, or given again where the manifest cannot hold it."""
    if given is not None:
        if given.plain() != manifest["config"]:
            raise ConfigError(f"{folder} began with another config than the one given")
        return given
    objects = unnamed(manifest["config"])
    if objects:
        raise ConfigError(f"{folder}: {objects[0]} was a Python object; pass the same config again, holdfast.resume(path, config=...)")
    try:
        config = make_config(manifest["config"])
        config.parts()
    except UnknownPart as error:  # what a run directory names is not run unasked: the files may not be the reader's own
        files = manifest.get("plugins", [])
        if not files:
            raise
        unknown, names = str(error).partition(";")[0], ", ".join(map(str, files))
        raise ConfigError(f"{folder}: {unknown}; this run used plug-ins ({names}); if you trust them, pass --plugin FILE") from None
    return config


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


def _play(experiments: list[Experiment], engine: Engine, device: torch.device, watch: Watch) -> list[dict[str, Any]]:
    watch.planned(experiments)
    if device.type == "cuda":  # by default cuDNN may choose algorithms whose bits differ from call to call
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
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


def _tried(experiments: list[Experiment], device: torch.device, asked: int | None) -> tuple[int, dict[str, Forecast]]:
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
            engine.plan, cell.network, cell.initial, simulator.on_device(cell.federation.samples), data, cell.recipe, rows,
            parse_memory(engine.memory),
        )  # fmt: skip
        out[experiment.cell.plan_key] = forecast
    return out


def _sentence(forecast: Forecast, experiments: list[Experiment], threads: int) -> str:
    plan = forecast.plan
    measured = ", ".join(f"{name} {micro:.0f} us" for name, micro in forecast.measured.items())
    seconds = forecast.seconds(sum(_client_steps(e) for e in experiments))
    if seconds is None:
        return f"plan {plan.name} (nothing to train)"
    where = f"{threads} thread{'s' if threads > 1 else ''}"
    expect = f"expect about {max(seconds, 0.1):.1f} s of training and {max(forecast.memory // 10**6, 1)} MB for a stack"
    return f"plan {plan.name}, {where} (per client step: {measured}); {expect}"


def _cohort_size(experiment: Experiment) -> int:
    return experiment.roster.cohort_size()


def _client_steps(experiment: Experiment) -> float:
    """Steps of all clients' models over the whole run, as planned."""
    train, count = experiment.config.train, experiment.cell.federation.train.counts.double()
    per_epoch = (count / train.batch_size).floor() if train.drop_last else (count / train.batch_size).ceil()
    steps = float(train.local_steps) if train.local_steps is not None else float(per_epoch.mean()) * train.local_epochs
    return steps * _cohort_size(experiment) * experiment.rule.models_per_client * train.rounds


def _manifest(
    experiment: Experiment, plan: Plan, threads: int, device: torch.device, group: list[str], plugins: Sequence[str]
) -> dict[str, Any]:
    return {
        "holdfast": __version__, "torch": torch.__version__, "python": platform.python_version(), "label": experiment.label,
        "config": experiment.config.plain(), "plan": asdict(plan), "threads": threads, "device": str(device), "group": group,
        "partition": experiment.federation.digest, "initial": _digest(experiment.initial),
        "plugins": sorted({*(str(Path(p).resolve()) for p in plugins), *_plugins_of(experiment)}),
        "clients": experiment.federation.clients, "parameters": experiment.network.layout.parameters,
        "malicious": experiment.adversary.malicious.tolist(), "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _digest(initial: torch.Tensor) -> str:
    """Names the start weights, which a user's own module brings along."""
    return hashlib.sha256(initial.cpu().numpy().tobytes()).hexdigest()


def _plugins_of(experiment: Experiment) -> set[str]:
    """The plug-in files behind its parts, however they were loaded."""
    parts = experiment.parts
    chosen = (parts.method, parts.model, parts.aggregator, *parts.detectors, parts.attack, parts.loss)
    return {file for file in map(plugin_of, chosen) if file is not None}


def _folder(place: int, cells: int, label: str) -> str:
    safe = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in label)[:80]
    number = f"{place:0{max(3, len(str(cells - 1)))}d}"  # as wide as the largest, so that folders sort as cells do
    return f"{number}-{safe}" if safe else number


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
