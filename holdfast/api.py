"""Holdfast from Python: keyword arguments are the sections of a config file. An object can take the place of
a part's name."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.data.handed.content import HandedOver
from holdfast.data.handed.data import handed_again
from holdfast.data.handed.kept import with_data
from holdfast.engine.ranks import here, on_first
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.config_tables import as_table, merge
from holdfast.experiment.extension import whole_rounds
from holdfast.experiment.given_again import call
from holdfast.experiment.manifest import is_sweep, read_manifest
from holdfast.experiment.runner import RunCallbacks
from holdfast.forecast.extrapolation import Forecast
from holdfast.forecast.measure import forecast_cost
from holdfast.interactive.interruption import stoppable
from holdfast.interactive.opening import open_folder
from holdfast.interactive.progress import shown, shown_status
from holdfast.interactive.run import Run
from holdfast.interactive.sweep import Sweep, SweepCell, cell_of
from holdfast.sweeps.grid import configs
from holdfast.sweeps.launch import OnDevices
from holdfast.sweeps.launchers import Launchers, launcher_of
from holdfast.sweeps.list_axes import laid_over, settled
from holdfast.sweeps.runner import resume_sweep
from holdfast.sweeps.runner import sweep as run_sweep
from holdfast.sweeps.session import resume as resume_runs
from holdfast.sweeps.session import start
from holdfast.tracking.following import Make, tracked
from holdfast.tracking.following import chosen as named
from holdfast.tuning.tune import Tuned, Tuning

__all__ = ["Run", "Sweep", "SweepCell", "fresh_folder", "open", "plan", "resume", "run", "sweep", "tune"]

Given = Config | Mapping[str, Any] | str | Path
"""A config: nested dicts, the path of a TOML file, or a Config."""


def run(
    config: Given | None = None,
    out: str | Path | None = None,
    watch: RunCallbacks | None = None,
    track: Sequence[str | Make] = (),
    progress: bool | None = None,
    **sections: Any,
) -> Run:
    """Run one experiment and return it.

    >>> run = holdfast.run(method="ditto", train={"rounds": 3}, data={"clients": 8})
    >>> run.final["accuracy"]
    >>> run = holdfast.run("config.toml", train={"rounds": 2})     # the file, but two rounds

    Sections beside a config change only the keys that they name, as `--set` does. `out` is the directory of
    the run; by default a new one under runs/. `track` names trackers that log its rounds ("tensorboard",
    "mlflow", "wandb"), or holds your own class (holdfast.tracking.Tracker). A bar shows the progress on a
    terminal and in a notebook; `progress=False` turns it off. Ctrl-C returns the run with the rounds that
    are finished and says how to continue it; a second Ctrl-C raises."""
    chosen = _one(_merged(config, sections))
    path = Path(out) if out is not None else fresh_folder()
    with (
        stoppable(lambda: f"{_resuming(path)} continues the run", (path / "head.json").exists),
        shown(progress, watch) as watching,
        tracked(track, watching) as followed,
    ):
        start([("", chosen)], path, followed)
    return Run(path, chosen)


def sweep(
    config: Given | None = None,
    out: str | Path | None = None,
    shard: tuple[int, int] = (1, 1),
    retry: bool = False,
    watch: RunCallbacks | None = None,
    track: Sequence[str | Make] = (),
    progress: bool | None = None,
    slurm: str | None = None,
    ray: bool | str | None = None,
    devices: str | None = None,
    ray_interval: float | None = None,
    **sections: Any,
) -> Sweep:
    """Run a grid of experiments together, or one shard of it, and return all its cells.

    >>> sweep = holdfast.sweep(
    ...     method=["fedavg", Ditto(lam=0.5)], seed=[0, 1], train={"rounds": 3, "lr": [0.1, 0.01]}
    ... )
    >>> [cell.label for cell in sweep][:2]
    ['fedavg seed=0 lr=0.1', 'fedavg seed=0 lr=0.01']
    >>> sweep.frame, sweep.best(), sweep.plot()

    A list where the config wants one value is an axis of the grid; for a setting that is a list itself
    (`detectors`, `evaluate.metrics`) a list of lists is. A table "sweep" says the same with dotted keys:
    `sweep={"method.name": ["fedavg", "ditto"]}`.

    The same call continues a sweep that was stopped, also one over objects: give `out`. A cell that fails
    raises no exception; it runs again only with `retry`. The other arguments are those of `run`.

    `slurm="partition=gpu gpus=8 time=02:00:00"` submits the sweep to a SLURM cluster in place of running it,
    prints the job, and returns the cells as they are now; the same call submits what is left.

    `devices="all"` trains on all GPUs of this machine, a process each; a list such as "cuda:0,cuda:1" or
    "cpu:2" names them. `ray=True` starts a Ray cluster on this machine, `ray="10.0.0.1:6379"` uses the one
    there; committed rounds come back at least every `ray_interval` seconds (30). Objects cannot travel there;
    data that was handed over can."""
    launcher = launcher_of(ray, devices, ray_interval)
    table = _merged(config, _on(launcher, sections))
    if not table.get("sweep"):
        raise ConfigError(
            "sweep: no setting has a list, so there is nothing to sweep over; give a list, such as"
            " seed=[0, 1, 2], or use holdfast.run"
        )
    path = Path(out) if out is not None else fresh_folder()
    if slurm is not None:
        return _submitted(slurm, table, path, shard, track, retry, progress)
    cells = configs(table)
    with (
        stoppable(
            lambda: f"the same call with out={str(path)!r} continues the sweep", lambda: is_sweep(path)
        ) as stop,
        shown(progress, watch) as watching,
        tracked(track, watching) as followed,
    ):
        statuses = run_sweep(cells, path, followed, shard=shard, retry=retry, launcher=launcher)
    if stop.pressed:
        return _so_far(path, [chosen for _, chosen in cells])
    return Sweep(
        path,
        [cell_of(status, chosen) for status, (_, chosen) in zip(statuses, cells, strict=True)],
    )


def tune(
    config: Given | None = None,
    budget: int | None = None,
    out: str | Path | None = None,
    under_attack: bool = False,
    retry: bool = False,
    watch: RunCallbacks | None = None,
    track: Sequence[str | Make] = (),
    progress: bool | None = None,
    ray: bool | str | None = None,
    devices: str | None = None,
    ray_interval: float | None = None,
    **sections: Any,
) -> Tuned:
    """Compare methods fairly: `budget` trials for every line of the table that the config asks for, chosen on
    the clients' validation data, then reported on test data with other seeds.

    >>> tuned = holdfast.tune(
    ...     method=["fedavg", "ditto"], data={"split": {"train": 0.65, "validation": 0.1}}, budget=4
    ... )
    >>> print(tuned)

    The same call with `out` continues a comparison that was stopped. Trackers log the runs of the report,
    not the trials. `ray`, `devices` and `ray_interval` are those of `sweep`."""
    if budget is None:
        raise ConfigError("tune: give budget, the number of trials for every method, such as budget=8")
    named(track)
    path = Path(out) if out is not None else fresh_folder()
    launcher = launcher_of(ray, devices, ray_interval)
    table = settled(_merged(config, _on(launcher, sections)))
    tuning = Tuning(table, budget, path, under_attack, launcher)
    with stoppable(lambda: f"the same call with out={str(path)!r} continues the comparison", path.exists):
        with shown(progress, watch, "validation/accuracy") as watching:  # test data stays unseen in trials
            choices = tuning.try_all(watching, retry=retry)
        with shown(progress, watch) as watching, tracked(track, watching) as followed:
            return tuning.report(choices, followed, retry=retry)
    raise KeyboardInterrupt


def plan(
    config: Given | None = None,
    out: str | Path | None = None,
    shard: tuple[int, int] = (1, 1),
    watch: RunCallbacks | None = None,
    progress: bool | None = None,
    **sections: Any,
) -> Forecast:
    """Forecast what `run` (or `sweep`, if a setting has a list) would cost: seconds, memory, bytes on disk.

    >>> forecast = holdfast.plan(method="ditto", train={"rounds": 500})
    >>> forecast.seconds.total, forecast.disk.total

    It runs a few short rounds beside `out` and leaves no files behind."""
    cells = configs(_merged(config, sections))
    with shown_status(progress, watch) as watching:
        return forecast_cost(cells, Path(out) if out is not None else fresh_folder(), watching, shard=shard)


def resume(
    path: str | Path,
    watch: RunCallbacks | None = None,
    config: Given | None = None,
    device: str | None = None,
    track: Sequence[str | Make] = (),
    data: Any = None,
    progress: bool | None = None,
    rounds: int | None = None,
    **sections: Any,
) -> Run | Sweep:
    """Continue a run or a sweep that was stopped, or give it more rounds, and return it.

    >>> run = holdfast.resume("runs/first")
    >>> run = holdfast.resume("runs/first", rounds=100)     # also when it is finished
    >>> run = holdfast.resume("runs/mine", model=holdfast.Model(Net, head="fc"))     # was given an object

    An extended run equals one that had so many rounds from the start. A method that trains once more after
    its last round, and a schedule that stretches over all rounds, cannot be extended, and say so.

    A run that was given Python objects (a module, a loss) needs them again, as sections or in `config`; to
    continue a sweep of objects, call `sweep` again. `data` is needed where data was handed over in Python and
    the directory has no copy of it."""
    folder, handed, rounds = Path(path), handed_again(data), whole_rounds(rounds)
    chosen = _again(folder, config, sections, handed)
    many = is_sweep(folder)
    with (
        stoppable(lambda: f"{_resuming(folder)} continues it") as stop,
        shown(progress, watch) as watching,
        tracked(track, watching) as followed,
    ):
        if many:
            statuses = resume_sweep(folder, followed, device, data=handed, rounds=rounds)
        else:
            resume_runs(folder, followed, device, config=chosen, data=handed, rounds=rounds)
    if not many:
        return Run(folder, chosen, handed)
    if stop.pressed:
        return Sweep.opened(folder, handed)
    return Sweep(folder, [cell_of(status, data=handed) for status in statuses])


def open(path: str | Path, data: Any = None, **sections: Any) -> Run | Sweep:
    """Open what a folder holds: a `Run`, or a `Sweep` for a sweep, a folder of runs or a finished `tune`.

    >>> holdfast.open("runs/first")
    Run(ditto on digits, 8 clients, round 3 of 3, finished, accuracy 0.8714: runs/first)
    >>> holdfast.open("runs/table").frame
    >>> holdfast.open("runs/mine", model=Net).model(client=1)     # was given an object

    Metrics and tables need nothing else. Models of a run that was given Python objects (a module, a loss)
    need them again, as sections; `data` is needed where data was handed over in Python and the directory has
    no copy of it. `holdfast.load` gives the metrics of many runs as one data frame instead."""
    return open_folder(path, handed_again(data), sections)


def _submitted(
    text: str,
    table: Mapping[str, Any],
    path: Path,
    shard: tuple[int, int],
    track: Sequence[str | Make],
    retry: bool,
    progress: bool | None,
) -> Sweep:
    """Submit what is left of a sweep to a SLURM cluster."""
    from holdfast.sweeps.slurm import slurm_sweep

    if shard != (1, 1):
        raise ConfigError("sweep: leave out shard with slurm, which gives every element its shard")
    named(track)
    trackers = [name for name in track if isinstance(name, str)]
    if len(trackers) < len(track):
        raise ConfigError("sweep: with slurm, track takes names only; the cells run in other processes")
    asked = slurm_sweep(text, settled(table), path, track=trackers, retry=retry)
    if asked.left():
        job = asked.submit()
        if progress is not False:
            print("\n".join(f"{title:15} {line}" for title, line in asked.described(job).items()))
    return Sweep.opened(path)


def _merged(config: Given | None, sections: Mapping[str, Any]) -> dict[str, Any]:
    """A config with keyword sections laid over it, and its lists as axes of a grid."""
    return laid_over(as_table(config), sections)


def _on(launcher: Launchers | None, sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sections, with the device that `devices` means."""
    if not isinstance(launcher, OnDevices):
        return sections
    return merge(sections, {"engine": {"device": launcher.kind}})


def _one(table: Mapping[str, Any]) -> Config:
    if table.get("sweep"):
        keys = ", ".join(key for key in table["sweep"] if key != "override")
        raise ConfigError(
            f"the config has lists to sweep over ({keys}), so it is a sweep; use holdfast.sweep"
        )
    return make_config({name: given for name, given in table.items() if name not in ("sweep", "tune")})


def _again(
    folder: Path, config: Given | None, sections: Mapping[str, Any], data: Sequence[HandedOver]
) -> Config | None:
    """The config of a run that is given again; sections alone are laid over the one that it began with."""
    if config is None and not sections:
        return None
    if is_sweep(folder):
        raise ConfigError(
            f"{folder} is a sweep; to give objects again call holdfast.sweep with the same config and out"
        )
    if isinstance(config, Config) and not sections:
        return config
    began = with_data(read_manifest(folder)["config"], folder, data) if config is None else as_table(config)
    return make_config(merge(began, sections))


def _resuming(folder: Path) -> str:
    """The call that continues a run or a sweep."""
    return call("resume", folder, {} if is_sweep(folder) else read_manifest(folder)["config"])


def _so_far(path: Path, chosen: Sequence[Config]) -> Sweep:
    """The cells of a sweep that was interrupted."""
    cells = Sweep.opened(path)
    for cell, config in zip(cells, chosen, strict=True):
        if cell.run is not None:
            cell.run._config = config
    return cells


def fresh_folder(base: str | Path = "runs") -> Path:
    """Return a new path such as runs/20261115-093012, with -2, -3 ... if that exists. Processes that run an
    experiment together get the same."""
    return Path(on_first(here(), lambda: str(_fresh(Path(base)))))


def _fresh(base: Path) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in itertools.count(1):
        path = base / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        if not path.exists():
            return path
    raise AssertionError
