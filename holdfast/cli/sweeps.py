"""`holdfast sweep` runs a grid of experiments as one computation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.app import (
    AsJson,
    Changes,
    DataDir,
    Device,
    Devices,
    Explain,
    Memory,
    PlanName,
    Plugins,
    PrecisionName,
    Ray,
    RayInterval,
    Retry,
    Track,
    Workers,
    app,
    check_explain,
    launcher,
    only_json,
    print_json,
    to_stderr,
)
from holdfast.cli.runs import (
    engine_options,
    is_grid,
    read_cells,
    read_table,
    resumable,
    summarise,
    trained_on,
)
from holdfast.cli.sweep_slurm import DryRun, Slurm, print_submitted, submit_sweep
from holdfast.core.errors import ConfigError
from holdfast.interactive.progress import Follow

if TYPE_CHECKING:
    from holdfast.experiment.config import Config
    from holdfast.storage.status import RunStatus
    from holdfast.sweeps.runner import Launcher


@app.command()
def sweep(
    config: Annotated[
        Path | None, typer.Argument(help="TOML file with a section \\[sweep].", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory of the sweep; default: a new one under runs/.")
    ] = None,
    shard: Annotated[
        str, typer.Option("--shard", metavar="I/N", help="Run only one of N parts of the sweep: 1/N to N/N.")
    ] = "1/1",
    devices: Devices = None,
    ray: Ray = None,
    ray_interval: RayInterval = None,
    slurm: Slurm = None,
    dry_run: DryRun = False,
    retry: Retry = False,
    changes: Changes = None,
    device: Device = None,
    plan: PlanName = None,
    precision: PrecisionName = None,
    memory: Memory = None,
    workers: Workers = None,
    plugin: Plugins = None,
    data_dir: DataDir = None,
    track: Track = None,
    explain: Explain = False,
    as_json: AsJson = False,
) -> int:
    """Run a grid of experiments together; the same command continues a sweep that was stopped.

    The lists in the section \\[sweep] of CONFIG expand to a grid. Each combination is one experiment, a cell.

    A finished cell does not run again. A cell that fails does not stop the others; the exit code is then 1. A
    cell that diverges is a result: the table marks it, and the exit code stays 0.

    With --shard, several processes or machines share the cells. Give all of them the same CONFIG and the same
    --out, in a folder that all can see.

    With --slurm, the sweep is submitted to a SLURM cluster instead of being run here: an array job. Each of
    its elements runs one shard, with one GPU if you ask for gpus=N, and is queued again when its time ends.
    The text has settings of sbatch (partition, account, qos, mem, constraint ...), time=HH:MM:SS, jobs=N (how
    many elements) and cpus=N (of each).

    With --devices or --ray, one command uses several devices: each trains cells that form one batched
    computation, and a worker that is lost is replaced. With --ray no folder needs to be shared. A machine
    that dies loses at most the training since its rounds last came back (--ray-interval).

    \b
    Examples:
      holdfast sweep sweep.toml --out runs/table
      holdfast sweep sweep.toml --out runs/table --shard 2/4
      holdfast sweep sweep.toml --out runs/table --retry
      holdfast sweep sweep.toml --out runs/table --devices all
      holdfast sweep sweep.toml --out runs/table --device cuda --ray 10.0.0.1:6379
      holdfast sweep sweep.toml --slurm "partition=gpu gpus=8 time=02:00:00" --dry-run

    """
    check_explain(explain, as_json)
    if slurm is not None and not (ray is None and devices is None):
        raise ConfigError("--slurm, --ray and --devices are three ways to use several devices; give one")
    options = engine_options(device, plan, precision, memory, workers, data_dir)
    if slurm is not None or dry_run:
        with only_json(as_json):
            table = read_table(config, changes or [], options, plugin)
            submitted = submit_sweep(slurm, dry_run, table, out, shard, plugin, track, retry)
        if submitted is not None:
            return print_submitted(submitted, as_json)
    with only_json(as_json):
        from holdfast.api import fresh_folder

        part, chosen = read_shard(shard), launcher(ray, ray_interval, devices, device)
        if out is None and part[1] > 1:
            raise ConfigError("--shard: give the directory that all shards share with --out")
        if (on := trained_on(chosen)) is not None:
            options["engine.device"] = on
        cells = read_cells(config, changes or [], options, plugin)
        if not is_grid(cells):
            raise ConfigError(
                "sweep: the config has no [sweep] section with a list; add one, or use `holdfast run` for one"
                " experiment"
            )
        folder = out or fresh_folder()
        statuses = run_sweep(cells, folder, plugin, part, retry, track, chosen)
    return finish_sweep(folder, statuses, as_json, plugin, explain)


def read_shard(text: str) -> tuple[int, int]:
    """Read '2/4' as two numbers."""
    number, _, of = text.partition("/")
    if not (number.strip().isdecimal() and of.strip().isdecimal()) or not 1 <= int(number) <= int(of):
        raise ConfigError(f"--shard {text}: write I/N with I from 1 to N, for example 2/4")
    return int(number), int(of)


def run_sweep(
    cells: list[tuple[str, Config]],
    folder: Path,
    plugins: list[Path] | None,
    shard: tuple[int, int] = (1, 1),
    retry: bool = False,
    track: list[str] | None = None,
    chosen: Launcher | None = None,
) -> list[RunStatus]:
    from holdfast.sweeps.runner import sweep
    from holdfast.tracking import tracked

    with (
        Follow(to_stderr()) as follow,
        resumable(folder, plugins, same_command=chosen is not None),
        tracked(track or [], follow.watch()) as watch,
    ):
        return sweep(cells, folder, watch, [str(p) for p in plugins or []], shard, retry, launcher=chosen)


def finish_sweep(
    folder: Path,
    statuses: list[RunStatus],
    as_json: bool,
    plugins: list[Path] | None,
    explain: bool = False,
) -> int:
    """Print the status of every cell, as tables or as JSON; return 1 if a cell of this process failed."""
    from holdfast.experiment.manifest import run_folders
    from holdfast.report.equal_runs import without_effect
    from holdfast.report.instability import advice, unstable
    from holdfast.report.read_runs import SettingRuns, by_setting, one_each, read_records
    from holdfast.report.table import tabulate

    failed = [run_status for run_status in statuses if run_status.mine and run_status.status == "failed"]
    if as_json:
        print_json({"run_dir": str(folder), "cells": [run_status.plain() for run_status in statuses]})
        return 1 if failed else 0
    runs = read_records(folder) if run_folders(folder) else []
    by_path = {line.records[0].path: line for line in one_each(runs)}
    lines = [by_path.get(run_status.path, SettingRuns(run_status.label, ())) for run_status in statuses]
    tables = [tabulate(lines, [run_status.words for run_status in statuses])]
    over_seeds = by_setting(runs)
    if any(line.seeds > 1 for line in over_seeds) and len(over_seeds) > 1:
        tables.append(tabulate(over_seeds))
    summarise(folder, tables, plugins, explain)
    for warning in (*unstable(runs), *without_effect(runs)):
        to_stderr().print(warning, markup=False)
    if lost := [run_status for run_status in statuses if run_status.mine and run_status.status == "diverged"]:
        said = f"cells diverged: {len(lost)}; the first is {lost[0].path.name}, in round {lost[0].round}"
        mend = advice(by_path[lost[0].path].records[0].config)
        to_stderr().print(f"{said}; {mend}", markup=False, soft_wrap=True)
    if failed:
        say_failed(failed)
    return 1 if failed else 0


def say_failed(failed: list[RunStatus]) -> None:
    from holdfast.storage.status import TRACEBACK

    again = "--retry runs them again from their last committed round"
    to_stderr().print(
        f"cells failed: {len(failed)}; see {failed[0].path / TRACEBACK}; {again}",
        markup=False,
        soft_wrap=True,
    )
