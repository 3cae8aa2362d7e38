"""`holdfast data`: who holds what, before anything is trained."""

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
    cell,
    only_json,
    open_page,
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
    config: Annotated[Path | None, typer.Argument(show_default=False)] = None,
    changes: Changes = None,
    part: Annotated[
        SamplePart, typer.Option("--part", help="Which of a client's samples are counted.")
    ] = SamplePart.train,
    cell: Annotated[
        int,
        typer.Option("--cell", metavar="N", help="Which cell of a sweep, counted from 0 as its folder is."),
    ] = 0,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw the heat map as a picture.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with the heat map.")
    ] = None,
    everybody: Annotated[bool, typer.Option("--all", help="Print all clients, however many.")] = False,
    plugin: Plugins = None,
    data_dir: DataDir = None,
    opened: Opened = False,
    as_json: AsJson = False,
) -> None:
    """Show how the data of a config is dealt: the client x class table as a heat map.

    CONFIG is that of `holdfast run`; of a sweep, one cell is shown. Nothing is trained and no run is written.

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
            raise ConfigError(f"--cell: there are cells 0 to {len(cells) - 1}, got {cell}")
        console, chosen = to_stderr(), cells[cell][1]
        with console.status(f"reading {chosen.data.name}") if console.is_terminal else nullcontext():
            holdings = Holdings.of(chosen, part.value, _among(cells, cell))
        _write(holdings, png, html)
    if as_json:
        return print_json(holdings.plain())
    _print(holdings, everybody)
    for file in (png, html):
        if file is not None:
            print(file)
    if opened and html is not None:
        open_page(html)


def _among(cells: list[tuple[str, Config]], cell: int) -> str:
    """Which cell of a sweep is shown, and how many are dealt differently."""
    if not is_grid(cells):
        return ""
    different = {str((config.seed, config.plain()["data"])) for _, config in cells}
    ways = "all with the same data" if len(different) == 1 else f"{len(different)} different partitions"
    return f"cell {cell} of {len(cells)} ({cells[cell][0]}); {ways}"


def _write(holdings: Holdings, png: Path | None, html: Path | None) -> None:
    if png is not None:
        from holdfast.report.heat_map_png import write_png

        write_png(holdings, png)
    if html is not None:
        from holdfast.report.data_page import write_data_page

        write_data_page(holdings, html)


def _print(holdings: Holdings, everybody: bool) -> None:
    from rich.table import Table

    from holdfast.report.terminal_heat_map import heat_lines

    console = to_stdout()
    facts = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for word, text in holdings.described():
        facts.add_row(word, cell(text))
    console.print(facts)
    console.print()
    for line in heat_lines(holdings, console.width, everybody):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
