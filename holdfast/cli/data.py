"""`holdfast data` shows which client holds which samples, before anything is trained."""

from __future__ import annotations

from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.app import (
    AsJson,
    Changes,
    DataDir,
    Opened,
    Plugins,
    app,
    only_json,
    open_page,
    plain_text,
    print_json,
    to_stderr,
    to_stdout,
)
from holdfast.cli.runs import absolute, is_grid, read_cells
from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.experiment.config import Config
    from holdfast.report.class_counts import Holdings


class SamplePart(StrEnum):
    train, validation, test, all = "train", "validation", "test", "all"


@app.command("data")
def show_data(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="TOML file of a run or a sweep; default: the default settings.", show_default=False
        ),
    ] = None,
    changes: Changes = None,
    part: Annotated[SamplePart, typer.Option("--part", help="Samples to count.")] = SamplePart.train,
    cell: Annotated[
        int,
        typer.Option("--cell", metavar="N", help="Cell of a sweep, counted from 0."),
    ] = 0,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Also write the heat map as an image.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with the heat map.")
    ] = None,
    all_clients: Annotated[
        bool, typer.Option("--all", help="Print all clients, also if there are many.")
    ] = False,
    plugin: Plugins = None,
    data_dir: DataDir = None,
    opened: Opened = False,
    as_json: AsJson = False,
) -> None:
    """Show how a config divides its data among clients: samples per client and class, as a heat map.

    CONFIG is a config of `holdfast run` or `holdfast sweep`; of a sweep, one cell is shown. The command
    trains nothing and writes no run.

    \b
    Examples:
      holdfast data config.toml
      holdfast data --set data.partition.name=dirichlet --html data.html --open
      holdfast data sweep.toml --cell 3 --part test --json

    """
    if opened and html is None:
        raise ConfigError("--open: name the page with --html FILE")
    for option, file in (("--png", png), ("--html", html)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{option}: there is no folder {file.parent}")
    with only_json(as_json):
        from holdfast.report.class_counts import Holdings

        cells = read_cells(config, changes or [], {"data.dir": absolute(data_dir)}, plugin)
        if not 0 <= cell < len(cells):
            raise ConfigError(f"--cell {cell}: the sweep has cells 0 to {len(cells) - 1}")
        console, chosen = to_stderr(), cells[cell][1]
        with console.status(f"reading {chosen.data.name}") if console.is_terminal else nullcontext():
            holdings = Holdings.of(chosen, part.value, _among(cells, cell))
        _write(holdings, png, html)
    if as_json:
        return print_json(holdings.plain())
    _print(holdings, all_clients)
    for file in (png, html):
        if file is not None:
            print(file)
    if opened and html is not None:
        open_page(html)


def _among(cells: list[tuple[str, Config]], cell: int) -> str:
    """Say which cell of a sweep is shown, and how many different partitions the sweep has."""
    if not is_grid(cells):
        return ""
    different = {str((config.seed, config.plain()["data"])) for _, config in cells}
    ways = "all with the same data" if len(different) == 1 else f"{len(different)} different partitions"
    return f"cell {cell} of {len(cells)} ({cells[cell][0]}); {ways}"


def _write(holdings: Holdings, png: Path | None, html: Path | None) -> None:
    if png is not None:
        from holdfast.report.heat_map_files import write_heat_map

        write_heat_map(holdings, png)
    if html is not None:
        from holdfast.report.data_page import write_data_page

        write_data_page(holdings, html)


def _print(holdings: Holdings, all_clients: bool) -> None:
    from rich.table import Table

    from holdfast.report.terminal_heat_map import heat_lines

    console = to_stdout()
    facts = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for word, text in holdings.described():
        facts.add_row(word, plain_text(text))
    console.print(facts)
    console.print()
    for line in heat_lines(holdings, console.width, all_clients):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
