"""`holdfast compare` puts runs side by side and tests their differences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.app import (
    AsJson,
    Explain,
    Opened,
    Plugins,
    app,
    check_explain,
    load_plugins,
    only_json,
    open_page,
    print_explanations,
    print_json,
    to_stdout,
)
from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.report.compare import Comparison


@app.command()
def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run, sweep or folder of runs.", show_default=False)
    ],
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="Final metric to compare and test.")
    ] = "accuracy",
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="NAME",
            help="Test only against this line: its label, words of it, a method or a folder.",
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Also write a self-contained page (.html)."),
    ] = None,
    plugin: Plugins = None,
    opened: Opened = False,
    explain: Explain = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs: their settings, their final metrics, and paired tests over seeds.

    Runs that differ only by their seed are one line of the table. Two lines with at least three common seeds
    are tested as pairs: a t-test and Wilcoxon's signed-rank test, with Holm's correction for multiple tests.

    \b
    Examples:
      holdfast compare runs/fedavg runs/ditto
      holdfast compare runs/table --against fedavg --metric accuracy/worst10
      holdfast compare runs/table --out compare.html --open

    """
    check_explain(explain, as_json or markdown)
    if markdown and as_json:
        raise ConfigError("give --markdown or --json, not both")
    if out is not None and (out.suffix.lower() != ".html" or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out: {out} must end in .html and its folder must exist")
    if opened and out is None:
        raise ConfigError("--open: name the page with --out FILE.html")
    with only_json(as_json):
        from holdfast.report.compare import Comparison, read_lines
        from holdfast.report.compare_tables import as_markdown, write_compare_page

        load_plugins(plugin)
        comparison = Comparison(read_lines(folders), metric, against)
        if out is not None:
            write_compare_page(comparison, out)
    if as_json:
        print_json(comparison.plain())
    elif markdown:
        print(as_markdown(comparison), end="")
    else:
        _print(comparison, out, explain)
    if opened and out is not None:
        open_page(out)


def _print(comparison: Comparison, page: Path | None, explain: bool) -> None:
    from holdfast.report.column_help import explained
    from holdfast.report.compare_tables import parts
    from holdfast.report.table import narrowed, to_rich

    console = to_stdout()
    for part in parts(comparison):
        console.print(to_rich(narrowed(part.table, console.width), part.title))
        if part.note:
            console.print(part.note, style="dim", markup=False)
        console.print()
    if explain:
        print_explanations(console, explained(part.table for part in parts(comparison) if not part.words))
        console.print()
    for note in comparison.notes:
        console.print(f"* {note}", markup=False)
    if page is not None:
        console.print(f"page   {page}", markup=False, soft_wrap=True)
