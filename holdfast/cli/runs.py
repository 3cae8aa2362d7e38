"""`holdfast run` and `holdfast resume`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    Retry,
    Track,
    Workers,
    app,
    check_explain,
    command_line,
    launcher,
    load_plugins,
    only_json,
    print_explanations,
    print_json,
    print_line,
    to_stderr,
    to_stdout,
)
from holdfast.core.errors import ConfigError
from holdfast.core.files import expand
from holdfast.interactive.progress import Follow

if TYPE_CHECKING:
    from holdfast.experiment.config import Config
    from holdfast.report.table import Table

DIVERGED = 3
"""The exit code of a single run that diverged. In a sweep, divergence is a result: the table shows it, and
the exit code is 0."""


@app.command()
def run(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="TOML file; default: the default settings.", show_default=False)
    ] = None,
    changes: Changes = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory of the run; default: a new one under runs/.")
    ] = None,
    device: Device = None,
    devices: Devices = None,
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
    """Run one experiment.

    With a section \\[sweep] in CONFIG this is the same as `holdfast sweep`. `holdfast show config` lists all
    settings.

    The exit code is 3 if the run diverged: in some round no benign client sent a finite reply, or
    their loss was not finite.

    With --devices, or under torchrun, several processes run the experiment together: each trains some of the
    clients.

    \b
    Examples:
      holdfast run
      holdfast run --set method.name=ditto --set train.rounds=20
      holdfast run config.toml --out runs/first --json
      holdfast run config.toml --track tensorboard
      holdfast run config.toml --devices all
      torchrun --nproc-per-node 8 -m holdfast run config.toml --device cuda --out runs/big


    """
    check_explain(explain, as_json)
    with only_json(as_json):
        from holdfast.cli.sweeps import finish_sweep, run_sweep
        from holdfast.sweeps.session import start
        from holdfast.tracking import tracked

        options = engine_options(device, plan, precision, memory, workers, data_dir)
        chosen = launcher(None, None, devices, device)
        options["engine.device"] = device or trained_on(chosen)
        cells = read_cells(config, changes or [], options, plugin)
        if chosen is not None and not is_grid(cells):
            return on_devices(context, chosen, out or new_folder())
        folder, plugins = out or new_folder(), [str(p) for p in plugin or []]
        if is_grid(cells):
            statuses = run_sweep(cells, folder, plugin, track=track, chosen=chosen)
        else:
            with (
                Follow(to_stderr()) as follow,
                resumable(folder, plugin),
                tracked(track or [], follow.watch()) as watch,
            ):
                results = start(cells, folder, watch, plugins)
    return (
        finish_sweep(folder, statuses, as_json, plugin, explain)
        if is_grid(cells)
        else finish(folder, results[0], as_json, plugin, explain)
    )


@app.command()
def resume(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of the run or sweep.", show_default=False)
    ],
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds", metavar="N", help="New, higher number of rounds; also for a finished run.", min=1
        ),
    ] = None,
    device: Device = None,
    devices: Devices = None,
    retry: Retry = False,
    plugin: Plugins = None,
    track: Track = None,
    explain: Explain = False,
    as_json: AsJson = False,
) -> int:
    """Continue a run or a sweep that was stopped, or give it more rounds.

    The result is the same, bit for bit, as without the stop; with --rounds, as if the run had had so many
    rounds from the start.

    A method that trains once more after its last round, and a schedule that stretches over all rounds, cannot
    be given more rounds, and say so.

    Name the plug-ins of the run again: Holdfast loads no code that you did not name.

    Of a sweep, the command runs all unfinished cells of all shards that no other process is running.

    \b
    Examples:
      holdfast resume runs/20261115-093012
      holdfast resume runs/20261115-093012 --rounds 100
      holdfast resume runs/mine --plugin mine.py
      holdfast resume runs/big --devices all


    """
    check_explain(explain, as_json)
    with only_json(as_json):
        from holdfast.cli.sweeps import finish_sweep
        from holdfast.experiment.manifest import is_sweep
        from holdfast.sweeps.runner import resume_sweep
        from holdfast.sweeps.session import resume as continue_run
        from holdfast.tracking import tracked

        chosen = launcher(None, None, devices, device)
        if chosen is not None and not is_sweep(folder):
            return on_devices(context, chosen, folder)
        plugins = [str(p) for p in plugin or []]
        with (
            Follow(to_stderr()) as follow,
            resumable(folder, plugin),
            tracked(track or [], follow.watch()) as watch,
        ):
            if is_sweep(folder):
                statuses = resume_sweep(folder, watch, device, plugins, retry, rounds=rounds, launcher=chosen)
            else:
                results = continue_run(folder, watch, device, plugins, rounds=rounds)
        many = is_sweep(folder)
    return (
        finish_sweep(folder, statuses, as_json, plugin, explain)
        if many
        else finish(folder, results[0], as_json, plugin, explain)
    )


def on_devices(context: typer.Context, chosen: Any, folder: Path) -> int:
    """Run this command again, once on each of the devices that --devices chose."""
    from holdfast.cli.rank_processes import options_again, run_on

    out = {} if "out" not in context.params else {"out": folder}
    words = options_again(context, devices=None, device=trained_on(chosen), **out)
    return run_on(chosen.names(), words, folder)


def read_cells(
    config: Path | None, changes: list[str], options: dict[str, Any], plugins: list[Path] | None
) -> list[tuple[str, Config]]:
    """Return (label, config) of every experiment that the file, --set and the other options ask for,
    checked."""
    from holdfast.sweeps.grid import configs

    return configs(read_table(config, changes, options, plugins))


def read_table(
    config: Path | None, changes: list[str], options: dict[str, Any], plugins: list[Path] | None
) -> dict[str, Any]:
    """Return what the file, --set and the other options say, as plain tables, and load the plug-ins."""
    from holdfast.experiment.config_tables import assign, read_config

    load_plugins(plugins)
    table = read_config(config, changes)
    for key, value in options.items():
        if value is not None:
            assign(table, key, value)
    return table


def is_grid(cells: list[tuple[str, Config]]) -> bool:
    """Whether the config has a section [sweep]: then each cell has a label, also if there is only one."""
    return len(cells) > 1 or cells[0][0] != ""


def engine_options(
    device: str | None,
    plan: str | None,
    precision: str | None,
    memory: str | None,
    workers: int | None,
    data_dir: Path | None,
) -> dict[str, Any]:
    """Return the settings that options set; None where an option was not given."""
    engine = {"device": device, "plan": plan, "precision": precision, "memory": memory, "workers": workers}
    return {f"engine.{name}": value for name, value in engine.items()} | {"data.dir": absolute(data_dir)}


def trained_on(launcher: Any) -> str | None:
    """The device that --devices means for engine.device; None where another option says it."""
    return getattr(launcher, "kind", None)


def absolute(data_dir: Path | None) -> str | None:
    """Return the folder as an absolute path, since a run may be resumed from another folder. The shell does
    not expand the ~ in --data-dir=~/sets."""
    if data_dir is None:
        return None
    folder = expand(data_dir, "--data-dir").absolute()
    if not folder.is_dir():  # otherwise the data would be taken from the cache or the Hub
        raise ConfigError(f"--data-dir: there is no folder {folder}")
    return str(folder)


def new_folder() -> Path:
    from holdfast.api import fresh_folder

    return fresh_folder()


@contextmanager
def resumable(folder: Path, plugins: list[Path] | None = None, same_command: bool = False) -> Iterator[None]:
    """On Ctrl-C, say how to continue; the last committed round stays. What ran on several devices goes on
    there by the same command."""
    try:
        yield
    except KeyboardInterrupt:
        from holdfast.engine.ranks import follows

        if follows():
            raise typer.Exit(130) from None
        from holdfast.core.registry import plugin_options
        from holdfast.experiment.manifest import is_sweep, run_folders

        again = f"{command_line('resume', folder)}{plugin_options(plugins or [])}"
        kept = (
            f"the same command with --out {folder} continues it, and so does `{again}` on one device"
            if same_command and is_sweep(folder)
            else f"`{again}` continues it"
            if run_folders(folder) or is_sweep(folder)
            else "no round was finished, so nothing was saved"
        )
        to_stderr().print(f"interrupted; {kept}", markup=False)
        raise typer.Exit(130) from None


def finish(
    folder: Path, result: dict[str, Any], as_json: bool, plugins: list[Path] | None, explain: bool = False
) -> int:
    """Print the result of a run, as a table or as JSON."""
    from holdfast.engine.ranks import follows
    from holdfast.report.instability import unstable
    from holdfast.report.read_runs import one_each, read_records
    from holdfast.report.table import tabulate

    if follows():
        return 0
    if as_json:
        print_json(result)
    else:
        runs = read_records(folder)
        summarise(folder, [tabulate(one_each(runs))], plugins, explain)
        for warning in unstable(runs):
            to_stderr().print(warning, markup=False)
    return diverged(folder)


def diverged(folder: Path) -> int:
    """Return the exit code of a finished run: a script must not take a diverged model for a good one."""
    from holdfast.report.instability import advice
    from holdfast.report.read_runs import RunRecord
    from holdfast.storage.status import run_status

    found = run_status(folder, "")
    if found.status != "diverged":
        return 0
    say = f"{found.words}; {advice(RunRecord(folder).config)} (exit code {DIVERGED})"
    to_stderr().print(say, markup=False, soft_wrap=True)
    return DIVERGED


def summarise(folder: Path, tables: list[Table], plugins: list[Path] | None, explain: bool = False) -> None:
    """Print the tables of a run or a sweep, its directory, and the commands to look at it."""
    from holdfast.core.registry import plugin_options
    from holdfast.report.column_help import explained
    from holdfast.report.table import narrowed, to_rich

    console = to_stdout()
    for place, table in enumerate(tables):
        console.print()
        console.print(
            to_rich(
                narrowed(table, console.width), "over seeds (mean ± standard deviation)" if place else None
            )
        )
    if explain:
        print_explanations(console, explained(tables))
    console.print()
    print_line(console, f"run directory   {folder}")
    print_line(console, f"page            {command_line('report', folder)}{plugin_options(plugins or [])}")
    print_line(console, f"in Python       holdfast.load({str(folder)!r})")
