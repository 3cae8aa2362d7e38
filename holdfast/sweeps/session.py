"""Start or resume what a directory holds: one run, or a sweep of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.core.columns import OneRank
from holdfast.core.errors import DataError
from holdfast.core.registry import load_plugin
from holdfast.data.handed.content import HandedOver
from holdfast.data.lookup import check_folder
from holdfast.engine.ranks import follows, here, place, rank_device
from holdfast.engine.simulator import NEEDS_SAMPLES, Simulator
from holdfast.experiment.config import Config
from holdfast.experiment.manifest import is_sweep, read_manifest
from holdfast.experiment.runner import MakeEngine, RunCallbacks
from holdfast.experiment.session import resume_run, start_run
from holdfast.sweeps.runner import results_of, resume_sweep, sweep


def start(
    cells: Sequence[tuple[str, Config]],
    out: Path,
    watch: RunCallbacks | None = None,
    plugins: Sequence[str] = (),
    engine: MakeEngine = Simulator,
) -> list[dict[str, Any]]:
    """Run one new experiment in `out`, or a sweep of several in folders below it; an experiment that fails
    raises its error."""
    watch = RunCallbacks() if watch is None or follows() else watch
    if engine is Simulator and any(config.data.name == "declared" for _, config in cells):
        raise DataError(NEEDS_SAMPLES)  # before anything is written
    at = place() if engine is Simulator else None
    if len(cells) > 1:
        return results_of(sweep(cells, out, watch, plugins, engine=engine))
    ((label, config),) = cells
    if engine is Simulator:
        check_folder(config.data.dir)
    if at is not None:
        device = rank_device(config.engine.device, at)
        return [start_run(label, config, out, watch, plugins, engine, here(), device)]
    return [start_run(label, config, out, watch, plugins, engine)]


def resume(
    out: Path,
    watch: RunCallbacks | None = None,
    device: str | None = None,
    plugins: Sequence[str] = (),
    engine: MakeEngine = Simulator,
    config: Config | None = None,
    data: Sequence[HandedOver] = (),
    rounds: int | None = None,
) -> list[dict[str, Any]]:
    """Continue a run or a sweep under the plan and threads it began with. A run that was given Python objects
    needs its config again; one whose data was handed over and not kept, its data. `rounds` is a new and
    higher number of rounds."""
    watch = RunCallbacks() if watch is None or follows() else watch
    if is_sweep(out):
        return results_of(resume_sweep(out, watch, device, plugins, engine=engine, data=data, rounds=rounds))
    for plugin in plugins:
        load_plugin(plugin)
    at = place() if engine is Simulator else None
    manifest = read_manifest(out) if (Path(out) / "manifest.json").exists() else {}
    if at is None and not manifest.get("ranks"):
        return [resume_run(out, watch, device, engine, config, data, rounds)]
    ranks = here() or OneRank()  # one process goes on with what several began, with the same bits
    device = device if at is None else rank_device(device or str(manifest.get("device")), at)
    return [resume_run(out, watch, device, engine, config, data, rounds, ranks)]
