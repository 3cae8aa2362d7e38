"""Holdfast from Python: the same fields as in a config file, as keyword arguments; objects may stand where
names do."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.experiment.config import Config, as_table, make_config, merge
from holdfast.experiment.runner import Watch
from holdfast.forecast.extrapolation import Forecast
from holdfast.forecast.measure import forecast_cost
from holdfast.results.run import Run
from holdfast.storage.status import RunStatus
from holdfast.sweeps.grid import configs
from holdfast.sweeps.runner import sweep as run_sweep
from holdfast.sweeps.session import resume as resume_runs
from holdfast.sweeps.session import start
from holdfast.tracking.following import Make, tracked
from holdfast.tracking.following import chosen as named
from holdfast.tuning.tune import Tuned, Tuning

Given = Mapping[str, Any] | str | Path
"""A config as tables, or the path of its TOML file."""


def run(
    config: Config | Given | None = None,
    out: str | Path | None = None,
    watch: Watch | None = None,
    track: Sequence[str | Make] = (),
    **sections: Any,
) -> Run:
    """Play one experiment and return it. `out` is its directory; by default a new one under runs/. `track`
    names trackers to be told of its rounds too ("tensorboard", "mlflow", "wandb"), or holds a class of yours
    (holdfast.tracking.Tracker). Sections beside a config change only the keys that they name, as --set
    does."""
    chosen = (
        _sole(config, sections) if isinstance(config, Config) else _one(merge(as_table(config), sections))
    )
    path = Path(out) if out is not None else fresh_folder()
    with tracked(track, watch) as watching:
        start([("", chosen)], path, watching)
    return Run(path, chosen)


def sweep(
    config: Given,
    out: str | Path | None = None,
    shard: tuple[int, int] = (1, 1),
    retry: bool = False,
    watch: Watch | None = None,
    track: Sequence[str | Make] = (),
) -> list[SweptCell]:
    """Play all cells of a sweep together, or one shard of them; the same call starts, continues or completes
    what is in `out`.

    `config` has a table "sweep" whose lists expand to a grid. All cells of the grid are given back, with how
    each stands; a cell that fails raises nothing here, and is tried again only with `retry`."""
    cells = configs(as_table(config))
    with tracked(track, watch) as watching:
        statuses = run_sweep(
            cells, Path(out) if out is not None else fresh_folder(), watching, shard=shard, retry=retry
        )
    return [_swept_cell(run_status, chosen) for run_status, (_, chosen) in zip(statuses, cells, strict=True)]


@dataclass(frozen=True)
class SweptCell:
    """One cell of a sweep: its status (finished, diverged, failed, running elsewhere, other shard), in which
    round, why, and its run where it has begun."""

    label: str
    status: str
    round: int
    reason: str | None
    run: Run | None

    @property
    def final(self) -> dict[str, Any] | None:
        return self.run.final if self.run is not None and self.status in ("finished", "diverged") else None


def _swept_cell(run_status: RunStatus, config: Config) -> SweptCell:
    run = Run(run_status.path, config) if (run_status.path / "manifest.json").exists() else None
    return SweptCell(
        run_status.label, run_status.shared or run_status.status, run_status.round, run_status.reason, run
    )


def tune(
    config: Given,
    budget: int,
    out: str | Path | None = None,
    under_attack: bool = False,
    retry: bool = False,
    watch: Watch | None = None,
    track: Sequence[str | Make] = (),
) -> Tuned:
    """Compare methods fairly: `budget` trials for every line of the table that `config` asks for, chosen by
    the clients' validation data, then reported on test data under other seeds. The same call starts,
    continues or completes what is in `out`. Trackers are told of the report's runs, not of the trials."""
    named(track)
    tuning = Tuning(as_table(config), budget, Path(out) if out is not None else fresh_folder(), under_attack)
    choices = tuning.try_all(watch, retry=retry)
    with tracked(track, watch) as watching:
        return tuning.report(choices, watching, retry=retry)


def plan(
    config: Config | Given | None = None,
    out: str | Path | None = None,
    shard: tuple[int, int] = (1, 1),
    watch: Watch | None = None,
    **sections: Any,
) -> Forecast:
    """What `run` or, where there is a table "sweep", `sweep` would take with this config: seconds, memory,
    bytes on disk. Found by playing a few short rounds beside `out`; nothing is left behind."""
    if isinstance(config, Config):
        cells = [("", _sole(config, sections))]
    else:
        cells = configs(merge(as_table(config), sections))
    return forecast_cost(cells, Path(out) if out is not None else fresh_folder(), watch, shard=shard)


def _sole(config: Config, sections: Mapping[str, Any]) -> Config:
    if sections:
        raise ConfigError("give a Config or sections, not both")
    return config


def _one(table: Mapping[str, Any]) -> Config:
    if table.get("sweep"):
        raise ConfigError('the config has a section "sweep", so it is a sweep; holdfast.sweep plays it')
    return make_config({name: given for name, given in table.items() if name not in ("sweep", "tune")})


def resume(
    path: str | Path,
    watch: Watch | None = None,
    config: Config | Given | None = None,
    device: str | None = None,
    track: Sequence[str | Make] = (),
) -> Run | list[Run]:
    """Continue a run that was stopped, or all runs of a sweep. Where the config holds objects (a module, a
    loss), pass it again; a sweep of objects is continued by `sweep`."""
    chosen = config if isinstance(config, Config) or config is None else make_config(as_table(config))
    with tracked(track, watch) as watching:
        results = resume_runs(Path(path), watching, device, config=chosen)
    runs = [Run(result["run_dir"], chosen) for result in results]
    return runs[0] if (Path(path) / "manifest.json").exists() else runs


def fresh_folder(base: str | Path = "runs") -> Path:
    """runs/20261115-093012, or with -2, -3 ... when that exists."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in itertools.count(1):
        path = Path(base) / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        if not path.exists():
            return path
    raise AssertionError
