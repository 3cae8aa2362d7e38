"""Start, resume and steer runs: directories and locks are taken, the plan is chosen and written down, the experiments are driven."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast import __version__
from holdfast.config import Config, make_config, parse_memory
from holdfast.core.errors import ConfigError, RunError
from holdfast.core.registry import load_plugin
from holdfast.engine.lockstep import Player, drive
from holdfast.engine.simulator import Simulator
from holdfast.experiment import Experiment, shared_samples
from holdfast.local.forecast import Forecast, choose
from holdfast.local.plan import Plan
from holdfast.store import read_json

Say = Callable[[str], None]


@dataclass
class Watch:
    """How a caller follows a run: `say` gets lines worth printing, `moved` is called as experiments go on."""

    say: Say = lambda line: None
    moved: Callable[[Experiment], None] = lambda experiment: None
    planned: Callable[[list[Experiment]], None] = lambda experiments: None


def start(cells: Sequence[tuple[str, Config]], out: Path, watch: Watch | None = None, plugins: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Play new experiments together. One cell lives in `out` itself, several in folders below it."""
    watch = watch or Watch()
    samples = shared_samples([config for _, config in cells])
    single = len(cells) == 1
    experiments = [
        Experiment(config, out if single else out / _folder(place, label), label, store)
        for place, ((label, config), store) in enumerate(zip(cells, samples, strict=True))
    ]
    taken = [e.out for e in experiments if (e.out / "head.json").exists()]
    if taken:
        raise ConfigError(f"{taken[0]} holds a run already; `holdfast resume {taken[0]}` continues it, or choose another --out")
    engine = experiments[0].config.engine
    device = pick_device(engine.device)
    threads = engine.threads or torch.get_num_threads()
    with _threads(threads), _locked(experiments):
        forecasts = _forecasts(experiments, device, watch.say)
        labels = [e.label for e in experiments]
        for experiment in experiments:
            plan = forecasts[experiment.network.signature].plan
            experiment.store.write_json("manifest.json", _manifest(experiment, plan, threads, device, labels, plugins))
        return _play(experiments, {name: f.plan for name, f in forecasts.items()}, device, watch)


def resume(out: Path, watch: Watch | None = None, device: str | None = None, plugins: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Continue what is in a directory, a run or a sweep, under the plan and threads it began with."""
    watch = watch or Watch()
    folders = run_folders(out)
    if not folders:
        raise ConfigError(f"no run in {out}: it has no manifest.json")
    manifests = [read_manifest(folder) for folder in folders]
    for plugin in [*manifests[0].get("plugins", []), *plugins]:
        load_plugin(plugin)
    began = manifests[0]["device"]
    chosen = pick_device(device or began)
    if chosen.type != torch.device(began).type and device is None:
        raise RunError(f"{out} began on {began}; pass --device {chosen} to continue elsewhere, with other bits")
    configs = [make_config(manifest["config"]) for manifest in manifests]
    samples = shared_samples(configs)
    experiments = [
        Experiment(config, folder, manifest["label"], store)
        for config, folder, manifest, store in zip(configs, folders, manifests, samples, strict=True)
    ]
    for experiment, manifest in zip(experiments, manifests, strict=True):
        if experiment.federation.digest != manifest["partition"]:
            raise RunError(f"{experiment.out}: the data has changed since the run began (its partition is another)")
    plans = {e.network.signature: Plan(**m["plan"]) for e, m in zip(experiments, manifests, strict=True)}
    with _threads(int(manifests[0]["threads"])), _locked(experiments):
        return _play(experiments, plans, chosen, watch)


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
    return manifest


def pick_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"engine.device: '{name}' is not a device; write cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device: no CUDA device is available here; use cpu")
    return device


def _play(experiments: list[Experiment], plans: dict[str, Plan], device: torch.device, watch: Watch) -> list[dict[str, Any]]:
    watch.planned(experiments)
    by_cell = {id(e.cell): e for e in experiments}
    for experiment in experiments:
        experiment.network.module.to(device)
    players = [Player(e.cell, e.play()) for e in experiments]
    return drive(Simulator(plans, device), players, lambda player: watch.moved(by_cell[id(player.cell)]))


def _forecasts(experiments: list[Experiment], device: torch.device, say: Say) -> dict[str, Forecast]:
    """A plan for each network, tried on the data of its first experiment with as many rows as all its experiments train at once."""
    out: dict[str, Forecast] = {}
    for experiment in experiments:
        alike = [e for e in experiments if e.network.signature == experiment.network.signature]
        if experiment.network.signature in out:
            continue
        engine, cell = experiment.config.engine, experiment.cell
        simulator = Simulator({}, device)
        rows = sum(_cohort_size(e) * e.rule.models_per_client for e in alike)
        data = simulator.table([cell.data(experiment.roster.clients)])
        forecast = choose(
            engine.plan, cell.network, cell.initial, simulator.on_device(experiment.federation.samples), data, cell.recipe, rows,
            parse_memory(engine.memory),
        )  # fmt: skip
        out[experiment.network.signature] = forecast
        say(_sentence(forecast, alike))
    return out


def _sentence(forecast: Forecast, experiments: list[Experiment]) -> str:
    plan = forecast.plan
    measured = ", ".join(f"{name} {micro:.0f} us" for name, micro in forecast.measured.items())
    seconds = forecast.seconds(sum(_client_steps(e) for e in experiments))
    if seconds is None:
        return f"plan {plan.name} (nothing to train)"
    memory = max(forecast.memory // 10**6, 1)
    return f"plan {plan.name} (per client step: {measured}); expect about {max(seconds, 0.1):.1f} s of training and {memory} MB for a stack"


def _cohort_size(experiment: Experiment) -> int:
    return max(1, round(experiment.config.train.participation * len(experiment.roster.clients)))


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
        "partition": experiment.federation.digest, "plugins": [str(Path(p).resolve()) for p in plugins],
        "clients": experiment.federation.clients, "parameters": experiment.network.layout.parameters,
        "malicious": experiment.adversary.malicious.tolist(), "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _folder(place: int, label: str) -> str:
    safe = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in label)[:80]
    return f"{place:03d}-{safe}" if safe else f"{place:03d}"


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
def _threads(count: int) -> Iterator[None]:
    """Bits may depend on the number of threads, so it is part of a run."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
