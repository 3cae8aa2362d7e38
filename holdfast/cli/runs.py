"""`holdfast run`, `resume` and `report`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.app import AsJson, Opened, Plugins, app, load_plugins, only_json, open_page, print_json, to_stderr, to_stdout
from holdfast.cli.progress import Follow

if TYPE_CHECKING:
    from holdfast.config import Config
    from holdfast.report.gather import Cell

Results = list[dict[str, Any]]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1 ...", show_default=False)]


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(show_default=False)] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, for example train.lr=0.05; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Directory of the run; default: a new one under runs/.")] = None,
    device: Device = None,
    plan: Annotated[str | None, typer.Option("--plan", help="How clients are trained: auto (measures both), loop or vmap.")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="Bound on a stack of training clients, for example 2GB.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Processes that train side by side; default: measured.")] = None,
    plugin: Plugins = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Folder of Parquet datasets.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play an experiment, or all cells of a sweep together.

    CONFIG is a TOML file; without one, the defaults are played. With a section \\[sweep] it is a grid of experiments.

    \b
    Examples:
      holdfast run
      holdfast run --set method.name=ditto --set train.rounds=20
      holdfast run sweep.toml --out runs/sweep --json
    """
    where = data_dir and str(data_dir.absolute())
    options = {"engine.device": device, "engine.plan": plan, "engine.memory": memory, "engine.workers": workers, "data.dir": where}
    with only_json(as_json):
        from holdfast.session import start

        cells = read_cells(config, changes or [], options, plugin)
        folder = out or _fresh()
        with Follow(to_stderr()) as follow, resumable(folder, plugin):
            results = start(cells, folder, follow.watch(), [str(p) for p in plugin or []])
    finish(folder, results, [label for label, _ in cells], as_json, plugin)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    device: Device = None,
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Continue a run or a sweep in DIR that was stopped.

    The result is bit by bit that of one that was not. Plug-ins of the run are named again: no code is loaded that is not asked for.

    \b
    Examples:
      holdfast resume runs/20261115-093012
      holdfast resume runs/mine --plugin mine.py
    """
    with only_json(as_json):
        from holdfast.manifest import read_manifest, run_folders
        from holdfast.session import resume as continue_runs

        with Follow(to_stderr()) as follow, resumable(folder, plugin):
            results = continue_runs(folder, follow.watch(), device, [str(p) for p in plugin or []])
        labels = [read_manifest(path)["label"] for path in run_folders(folder)]
    finish(folder, results, labels, as_json, plugin)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    out: Annotated[Path | None, typer.Option("--out", help="The HTML file; default: report.html in DIR.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown instead of writing a page.")] = False,
    plugin: Plugins = None,
    opened: Opened = False,
) -> None:
    """Write one self-contained HTML page about the runs in DIR: a run, a sweep, or a folder of runs.

    \b
    Examples:
      holdfast report runs/sweep --open
      holdfast report runs/sweep --markdown >> notes.md
    """
    from holdfast.report.gather import by_setting, read_cells
    from holdfast.report.page import write_page
    from holdfast.report.table import tabulate, to_markdown

    load_plugins(plugin)
    if markdown:
        print(to_markdown(tabulate(by_setting(read_cells(folder)))), end="")
        return
    page = write_page(folder, out)
    print(page)
    if opened:
        open_page(page)


def read_cells(config: Path | None, changes: list[str], options: dict[str, Any], plugins: list[Path] | None) -> list[tuple[str, Config]]:
    """(label, config) of every experiment that the file, --set and the other options ask for; all of it checked."""
    from holdfast.config import assign, make_config, read_config
    from holdfast.core.errors import HoldfastError
    from holdfast.sweep import expand

    load_plugins(plugins)
    table = read_config(config, changes)
    for key, value in options.items():
        if value is not None:
            assign(table, key, value)
    cells = []
    tables = expand(table)
    for label, cell in tables:
        try:
            made = make_config(cell)
            made.parts()
        except HoldfastError as error:
            raise type(error)(f"{error} (in the sweep's cell '{label}')" if len(tables) > 1 else str(error)) from None
        cells.append((label, made))
    return cells


def _fresh() -> Path:
    from holdfast.api import fresh_folder

    return fresh_folder()


@contextmanager
def resumable(folder: Path, plugins: list[Path] | None = None) -> Iterator[None]:
    """Ctrl-C between two rounds or inside one: the last committed round stays, and the user is told how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        from holdfast.core.registry import plugin_options
        from holdfast.manifest import run_folders

        again = f"holdfast resume {folder}{plugin_options(plugins or [])}"
        kept = f"`{again}` continues it" if run_folders(folder) else "it had not begun, and nothing was kept"
        to_stderr().print(f"interrupted; {kept}", markup=False)
        raise typer.Exit(130) from None


def finish(folder: Path, results: Results, labels: list[str], as_json: bool, plugins: list[Path] | None) -> None:
    """The result in the form that was asked for."""
    if not as_json:
        from holdfast.report.gather import read_cells

        return summarise(folder, read_cells(folder), plugins)
    if len(results) == 1:
        print_json(results[0])
    else:
        cells = [{"label": label, **result} for label, result in zip(labels, results, strict=True)]
        print_json({"run_dir": str(folder), "cells": cells})


def summarise(folder: Path, cells: list[Cell], plugins: list[Path] | None) -> None:
    """The table of a run or a sweep, where it is, and what one would do next."""
    from holdfast.core.registry import plugin_options
    from holdfast.report.gather import by_setting, one_each
    from holdfast.report.table import tabulate, to_rich

    console, lines = to_stdout(), by_setting(cells)
    console.print()
    console.print(to_rich(tabulate(one_each(cells))))
    if any(line.seeds > 1 for line in lines) and len(lines) > 1:
        console.print()
        console.print(to_rich(tabulate(lines), "over seeds (mean ± standard deviation)"))
    console.print()
    console.print(f"run directory   {folder}", markup=False, soft_wrap=True)
    console.print(f"page            holdfast report {folder}{plugin_options(plugins or [])}", markup=False, soft_wrap=True)
    console.print(f'in Python       holdfast.load("{folder}")', markup=False, soft_wrap=True)
