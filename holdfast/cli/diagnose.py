"""`holdfast diagnose` shows what a run recorded about its clients, as numbers and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.app import (
    AsJson,
    Opened,
    Plugins,
    app,
    load_plugins,
    only_json,
    open_page,
    plain_text,
    print_json,
    to_stdout,
)
from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.report.diagnosis import Diagnosis
    from holdfast.results.run import Run

_ENDINGS = (".csv", ".png", ".pdf", ".svg", ".html")


@app.command()
def diagnose(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.", show_default=False)],
    what: Annotated[
        str | None,
        typer.Argument(metavar="[WHAT]", help="Table to show; without it, list them.", show_default=False),
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write all numbers (.csv), a picture (.png, .pdf, .svg) or a page (.html); repeatable.",
        ),
    ] = None,
    round: Annotated[
        int | None, typer.Option("--round", metavar="N", help="Round to show of a matrix; default: the last.")
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option("--beside", metavar="RUN", help="grad-cam: another run to compare with; repeatable."),
    ] = None,
    image: Annotated[
        list[int] | None,
        typer.Option(
            "--image", metavar="N", help="grad-cam: number of a test image; repeatable; default: 0 1 2."
        ),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="grad-cam: leave out the trigger of the attack.")
    ] = False,
    share: Annotated[
        float,
        typer.Option(
            "--share", help="top-fim: share of the parameters that are replaced by those of a new network."
        ),
    ] = 0.05,
    rounds: Annotated[
        int | None, typer.Option("--rounds", metavar="N", help="rank-change: repeat only the first N rounds.")
    ] = None,
    plugin: Plugins = None,
    opened: Opened = False,
    as_json: AsJson = False,
) -> None:
    """Show what a run recorded about its clients: norms, weights, scores and tables of its method.

    Without WHAT, the command lists the tables of the run. Benign and malicious clients are shown separately.
    Of a matrix, one round is shown.

    \b
    Examples:
      holdfast diagnose runs/mine
      holdfast diagnose runs/mine norms --out norms.png
      holdfast diagnose runs/mine customisation --round 5 --out map.html
      holdfast diagnose runs/a grad-cam --beside runs/b --out looks.png


    """
    files = out or []
    for file in files:
        if file.suffix.lower() not in _ENDINGS:
            raise ConfigError(f"--out: {file} must end in {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}")
        if not file.absolute().parent.is_dir():
            raise ConfigError(f"--out: there is no folder {file.parent}")
    pages = [file for file in files if file.suffix.lower() == ".html"]
    if opened and not pages:
        raise ConfigError("--open: name the page with --out FILE.html")
    if what is None and files:
        raise ConfigError(
            "WHAT is missing: name the table to write; `holdfast diagnose RUN` lists the tables"
        )
    with only_json(as_json):
        from holdfast.results.run import Run

        load_plugins(plugin)
        run = Run(folder)
        found = (
            None
            if what is None
            else _found(run, what, round, [folder, *(beside or [])], image or [0, 1, 2], clean, share, rounds)
        )
        for file in files:
            assert found is not None
            found.write(file)
    if found is None:
        _list(run, as_json)
    elif as_json:
        print_json(found.frame.to_dict(orient="records"))
    else:
        _print(found)
        for file in files:
            print(file)
    if opened:
        open_page(pages[0])


def _found(
    run: Run,
    what: str,
    round: int | None,
    folders: list[Path],
    images: list[int],
    clean: bool,
    share: float,
    rounds: int | None,
) -> Diagnosis:
    from holdfast.diagnostics import computed
    from holdfast.diagnostics.recorded import diagnose as recorded
    from holdfast.results.run import Run

    if what == "rank-change":
        return computed.rank_change(run, rounds)
    if what == "top-fim":
        return computed.top_fim(run, share)
    if what == "grad-cam":
        runs = {path.resolve().name: Run(path) for path in folders}
        if len(runs) < len(folders):
            raise ConfigError(
                "--beside: two runs have the same folder name, which is their label; rename one of them"
            )
        return computed.grad_cam(runs, images, False if clean else None)
    if what not in (there := run.tables):
        raise ConfigError(f"{run.path} has no '{what}'; it has {', '.join([*there, *computed.COMPUTED])}")
    return recorded(run, what, round)


def _list(run: Run, as_json: bool) -> None:
    from rich.table import Table

    from holdfast.diagnostics.computed import COMPUTED

    there = {**run.tables, **COMPUTED}
    if as_json:
        return print_json(there)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, about in there.items():
        table.add_row(plain_text(name), plain_text(about))
    console = to_stdout()
    console.print(table)
    first = next(iter(there))
    console.print(
        f"\ndraw one   holdfast diagnose {run.path} {first} --out {first}.png", markup=False, soft_wrap=True
    )


def _print(found: Diagnosis) -> None:
    from rich.table import Table

    from holdfast.report.diagnosis import number

    console = to_stdout()
    console.print(found.title, style="bold", markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, column in enumerate(found.short.columns):
        numeric = found.short[column].dtype.kind in "if"
        table.add_column(plain_text(str(column)), justify="right" if numeric else "left", no_wrap=not place)
    for row in found.short.itertuples(index=False):
        table.add_row(*(plain_text(number(value)) for value in row))
    console.print(table)
