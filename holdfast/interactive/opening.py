"""Opens what a folder holds: a run or a sweep."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.experiment.manifest import is_sweep, run_folders
from holdfast.interactive.run import Run
from holdfast.interactive.sweep import Sweep


def open_folder(path: str | Path) -> Run | Sweep:
    """The run or the sweep in a folder; of `holdfast tune` its report, of a federation its run."""
    folder = Path(path)
    if (folder / "manifest.json").exists():
        return Run(folder)
    if is_sweep(folder):
        return Sweep.opened(folder)
    if (folder / "federation.toml").exists():
        return open_folder(folder / "server" / "run")
    if (folder / "trials").is_dir() and is_sweep(folder / "report"):
        return Sweep.opened(folder / "report")
    if run_folders(folder):
        return Sweep.opened(folder)
    what = "is no folder" if not folder.is_dir() else "holds no run and no sweep"
    raise ConfigError(f"{folder} {what}; give the folder that holdfast.run or holdfast.sweep has written")
