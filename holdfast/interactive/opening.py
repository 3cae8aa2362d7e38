"""Opens what a folder holds: a run or a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from holdfast.core.errors import ConfigError
from holdfast.data.handed.content import HandedOver
from holdfast.experiment.manifest import is_sweep, run_folders
from holdfast.interactive.run import Run
from holdfast.interactive.sweep import Sweep

Opened = TypeVar("Opened", Run, Sweep)


def open_folder(
    path: str | Path, data: Sequence[HandedOver] = (), again: Mapping[str, Any] | None = None
) -> Run | Sweep:
    """The run or the sweep in a folder; of `holdfast tune` its report, of a federation its run. `again` has
    the sections in which runs were given Python objects."""
    folder = Path(path)
    if (folder / "manifest.json").exists():
        return _checked(Run(folder, None, data, again), data, again)
    if is_sweep(folder):
        return _checked(Sweep.opened(folder, data, again), data, again)
    if (folder / "federation.toml").exists():
        return open_folder(folder / "server" / "run", data, again)
    if (folder / "trials").is_dir() and is_sweep(folder / "report"):
        return _checked(Sweep.opened(folder / "report", data, again), data, again)
    if run_folders(folder):
        return _checked(Sweep.opened(folder, data, again), data, again)
    what = "is no folder" if not folder.is_dir() else "holds no run and no sweep"
    raise ConfigError(f"{folder} {what}; give the folder that holdfast.run or holdfast.sweep has written")


def _checked(opened: Opened, data: Sequence[HandedOver], again: Mapping[str, Any] | None) -> Opened:
    """Refuse what is given at once, where it is not what the runs began with."""
    if data or again:
        for run in [opened] if isinstance(opened, Run) else opened.runs:
            run.config  # noqa: B018
    return opened
