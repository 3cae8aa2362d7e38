"""Holdfast from Python: keyword arguments are the sections of a config file. An object can take the place of
a part's name."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.data.handed.data import handed_again
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.config_tables import as_table, merge
from holdfast.experiment.runner import RunCallbacks
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
"""A config as nested dicts, or the path of its TOML file."""


def run(
    config: Config | Given | None = None,
    out: str | Path | None = None,
    watch: RunCallbacks | None = None,
    track: Sequence[str | Make] = (),
    **sections: Any,
) -> Run:
    """Run one experiment and return it. `out` is its directory; by default a new one under runs/. `track`
    names trackers that log its rounds ("tensorboard", "mlflow", "wandb"), or holds your own class
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
    watch: RunCallbacks | None = None,
    track: Sequence[str | Make] = (),
) -> list[SweepCell]:
    """Run all cells of a sweep together, or one shard of them. The same call continues a sweep that was
    stopped.

    `config` has a table "sweep" whose lists expand to a grid. Returns all cells of the grid with their
    status. A cell that fails raises no exception; it runs again only with `retry`."""
    cells = configs(as_table(config))
    with tracked(track, watch) as watching:
        statuses = run_sweep(
            cells, Path(out) if out is not None else fresh_folder(), watching, shard=shard, retry=retry
        )
    return [_sweep_cell(run_status, chosen) for run_status, (_, chosen) in zip(statuses, cells, strict=True)]


@dataclass(frozen=True)
class SweepCell:
    """One experiment of a sweep: its status (finished, diverged, failed, running elsewhere, other shard), the
    last round, the reason of a failure, and its run if it has begun."""

    label: str
    status: str
    round: int
    reason: str | None
    run: Run | None

    @property
    def final(self) -> dict[str, Any] | None:
        """The final metrics; None if the cell has not ended."""
        return self.run.final if self.run is not None and self.status in ("finished", "diverged") else None


def _sweep_cell(run_status: RunStatus, config: Config) -> SweepCell:
    run = Run(run_status.path, config) if (run_status.path / "manifest.json").exists() else None
    return SweepCell(
        run_status.label, run_status.shared or run_status.status, run_status.round, run_status.reason, run
    )


def tune(
    config: Given,
    budget: int,
    out: str | Path | None = None,
    under_attack: bool = False,
    retry: bool = False,
    watch: RunCallbacks | None = None,
    track: Sequence[str | Make] = (),
) -> Tuned:
    """Compare methods fairly: `budget` trials for every line of the table that `config` asks for, chosen on
    the clients' validation data, then reported on test data with other seeds. The same call continues a
    comparison that was stopped. Trackers log the runs of the report, not the trials."""
    named(track)
    tuning = Tuning(as_table(config), budget, Path(out) if out is not None else fresh_folder(), under_attack)
    choices = tuning.try_all(watch, retry=retry)
    with tracked(track, watch) as watching:
        return tuning.report(choices, watching, retry=retry)


def plan(
    config: Config | Given | None = None,
    out: str | Path | None = None,
    shard: tuple[int, int] = (1, 1),
    watch: RunCallbacks | None = None,
    **sections: Any,
) -> Forecast:
    """Forecast what `run` (or `sweep`, if the config has a table "sweep") would cost: seconds, memory, bytes
    on disk. Runs a few short rounds beside `out` and leaves no files behind."""
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
        raise ConfigError('the config has a section "sweep", so it is a sweep; use holdfast.sweep')
    return make_config({name: given for name, given in table.items() if name not in ("sweep", "tune")})


def resume(
    path: str | Path,
    watch: RunCallbacks | None = None,
    config: Config | Given | None = None,
    device: str | None = None,
    track: Sequence[str | Make] = (),
    data: Any = None,
) -> Run | list[Run]:
    """Continue a run that was stopped, or all runs of a sweep. If the config holds objects (a module, a
    loss), pass it again; to continue a sweep of objects, call `sweep` again. `data` is needed where the run
    was handed data in Python and its directory has no copy."""
    chosen = config if isinstance(config, Config) or config is None else make_config(as_table(config))
    handed = handed_again(data)
    with tracked(track, watch) as watching:
        results = resume_runs(Path(path), watching, device, config=chosen, data=handed)
    runs = [Run(result["run_dir"], chosen, handed) for result in results]
    return runs[0] if (Path(path) / "manifest.json").exists() else runs


def fresh_folder(base: str | Path = "runs") -> Path:
    """Return a new path such as runs/20261115-093012, with -2, -3 ... if that exists."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in itertools.count(1):
        path = Path(base) / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        if not path.exists():
            return path
    raise AssertionError
