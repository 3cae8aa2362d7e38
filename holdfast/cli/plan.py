"""`holdfast plan` forecasts the cost of a run or a sweep."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.app import (
    AsJson,
    Changes,
    DataDir,
    Device,
    Explain,
    Memory,
    PlanName,
    Plugins,
    PrecisionName,
    Workers,
    app,
    check_explain,
    only_json,
    plain_text,
    print_explanations,
    print_json,
    to_stderr,
    to_stdout,
)
from holdfast.cli.runs import engine_options, new_folder, read_cells
from holdfast.cli.sweeps import read_shard

if TYPE_CHECKING:
    from rich.table import Table

    from holdfast.experiment.runner import RunCallbacks
    from holdfast.forecast.extrapolation import Forecast

_SILENT = 2.0  # seconds
_TITLES = ("cells", "models", "stack", "plan", "processes", "client steps", "us/step")


@app.command()
def plan(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="TOML file of a run or a sweep; default: the default settings.", show_default=False
        ),
    ] = None,
    changes: Changes = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Directory that the run would have; the short rounds are written beside it."
        ),
    ] = None,
    shard: Annotated[
        str,
        typer.Option("--shard", metavar="I/N", help="Forecast only one of N parts of a sweep: 1/N to N/N."),
    ] = "1/1",
    device: Device = None,
    way: PlanName = None,
    precision: PrecisionName = None,
    memory: Memory = None,
    workers: Workers = None,
    plugin: Plugins = None,
    data_dir: DataDir = None,
    explain: Explain = False,
    as_json: AsJson = False,
) -> None:
    """Forecast what a run or a sweep will cost: time, memory, bytes on disk.

    CONFIG and the options are those of `holdfast run` and `holdfast sweep`.

    The command runs a few short rounds to measure, so it takes seconds. It leaves no files behind.

    \b
    Examples:
      holdfast plan sweep.toml
      holdfast plan sweep.toml --shard 1/4 --device cuda --json
      holdfast plan --set method.name=ditto --set train.rounds=500
    """
    check_explain(explain, as_json)
    with only_json(as_json):
        from holdfast.forecast.measure import forecast_cost

        part = read_shard(shard)
        cells = read_cells(
            config, changes or [], engine_options(device, way, precision, memory, workers, data_dir), plugin
        )
        try:
            with _Follow() as follow:
                found = forecast_cost(
                    cells, out or new_folder(), follow.watch(), [str(p) for p in plugin or []], part
                )
        except KeyboardInterrupt:
            to_stderr().print("interrupted; no files were left behind")
            raise typer.Exit(130) from None
    if as_json:
        return print_json(found.plain())
    console = to_stdout()
    console.print(_groups(found))
    if explain:
        from holdfast.report.column_help import explanations

        print_explanations(console, explanations(("group", *_TITLES)))
    console.print()
    console.print(_totals(found))


class _Follow:
    """Shows progress: on a terminal one line that changes; elsewhere a line every few seconds."""

    def __init__(self) -> None:
        self.console = to_stderr()
        self.status = self.console.status("building") if self.console.is_terminal else None
        self.said = time.monotonic()

    def watch(self) -> RunCallbacks:
        from holdfast.experiment.runner import RunCallbacks

        return RunCallbacks(say=self.say)

    def say(self, line: str) -> None:
        if self.status is not None:
            self.status.update(plain_text(line))
        elif time.monotonic() - self.said > _SILENT:
            self.said = time.monotonic()
            self.console.print(line, markup=False, style="dim")

    def __enter__(self) -> _Follow:
        if self.status is not None:
            self.status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status is not None:
            self.status.stop()


def _groups(found: Forecast) -> Table:
    """Make a table with one line for each group of cells that train as one computation: models of a round,
    how many of them take a step together, processes x threads."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("group", overflow="fold")
    for title in _TITLES:
        table.add_column(title, justify="left" if title in ("plan", "processes") else "right", no_wrap=True)
    for group in found.groups:
        name = group.cells[0] if len(group.cells) == 1 else f"{group.cells[0]} ... {group.cells[-1]}"
        micro = "-" if group.microseconds is None else f"{group.microseconds:,.0f}"
        table.add_row(
            plain_text(name),
            str(len(group.cells)),
            f"{group.rows:,}",
            f"{group.stack:,}",
            f"{group.plan} {group.precision}",
            f"{group.workers} x {group.threads}",
            f"{group.client_steps:,.0f}",
            micro,
        )
    return table


def _totals(found: Forecast) -> Table:
    from rich.table import Table

    from holdfast.report.numbers import amount, duration

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column(style="dim")
    seconds, disk = found.seconds, found.disk
    spent = {
        "start": seconds.start,
        "training": seconds.training,
        "evaluation": seconds.evaluation,
        "server and disk": seconds.server,
    }
    groups = f"{len(found.groups)} group{'s' if len(found.groups) > 1 else ''}"
    table.add_row("cells", str(len(found.cells)), f"trained as {groups} on {found.device}")
    table.add_row(
        "time",
        duration(seconds.total),
        ", ".join(f"{name} {duration(value)}" for name, value in spent.items()),
    )
    table.add_row("memory", amount(found.memory.host), "at its peak, libraries included")
    if found.memory.device is not None:
        table.add_row("GPU memory", amount(found.memory.device), "at its peak")
    rows = f"rounds {amount(disk.rounds)}, private rows {amount(disk.private)}, the rest {amount(disk.once)}"
    table.add_row("disk", amount(disk.total), f"in {disk.files:,} files: {rows}")
    return table
