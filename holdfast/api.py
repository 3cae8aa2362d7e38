"""Holdfast from Python: the same fields as in a config file, as keyword arguments; objects may stand where names do."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.config import Config, make_config
from holdfast.core.errors import ConfigError
from holdfast.results import Run
from holdfast.session import Watch, start
from holdfast.session import resume as resume_runs


def run(
    config: Config | Mapping[str, Any] | None = None, out: str | Path | None = None, watch: Watch | None = None, **sections: Any
) -> Run:
    """Play one experiment and return it. `out` is its directory; by default a new one under runs/."""
    if isinstance(config, Config):
        if sections:
            raise ConfigError("give a Config or sections, not both")
        chosen = config
    else:
        chosen = make_config({**(config or {}), **sections})
    path = Path(out) if out is not None else fresh_folder()
    start([("", chosen)], path, watch)
    return Run(path, chosen)


def resume(
    path: str | Path, watch: Watch | None = None, config: Config | Mapping[str, Any] | None = None, device: str | None = None
) -> Run | list[Run]:
    """Continue a run that was stopped, or all runs of a sweep. Where the config holds objects (a module, a loss), pass it again."""
    chosen = config if isinstance(config, Config) or config is None else make_config(config)
    results = resume_runs(Path(path), watch, device, config=chosen)
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
