"""`holdfast report` writes a page, tables or figures about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.app import Explain, Opened, Plugins, app, load_plugins, open_page
from holdfast.cli.live import Live, Port
from holdfast.cli.live import check as check_live
from holdfast.cli.live import follow as follow_live
from holdfast.core.errors import ConfigError
from holdfast.core.files import write_atomically


@app.command()
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A run, a sweep, a folder of runs, a reproduction or a federation.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="File to write; default: report.html in DIR. With --tables, the file of the tables."
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown instead of writing a page.")
    ] = False,
    tables: Annotated[
        str | None,
        typer.Option(
            "--tables", metavar="FORMAT", help="Write only the tables: md, latex (booktabs) or csv."
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", metavar="FOLDER", help="Write only the charts, each as a file in FOLDER."),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", help="Format of --figures: svg (default), png or pdf."),
    ] = None,
    live: Live = False,
    port: Port = None,
    plugin: Plugins = None,
    opened: Opened = False,
    explain: Explain = False,
) -> None:
    """Write one self-contained HTML page about a run or many runs.

    With more than 12 runs, each run also gets its own page, in a folder beside the first page.

    \b
    Examples:
      holdfast report runs/sweep --live --open
      holdfast report runs/sweep --open
      holdfast report runs/sweep --markdown >> notes.md
      holdfast report runs/sweep --tables latex --out tables.tex
      holdfast report runs/sweep --figures figures --format png

    """
    check_live(live, port, out, markdown)
    if form is not None and figures is None:
        raise ConfigError("--format is the format of --figures; add --figures FOLDER")
    form = form or "svg"
    if explain and not markdown:
        raise ConfigError("--explain explains the table that --markdown prints; on the page, point at a head")
    from holdfast.report.column_help import explained
    from holdfast.report.figure_files import write_figures
    from holdfast.report.page import all_sections, write_page
    from holdfast.report.read_runs import by_setting, read_records
    from holdfast.report.table import tabulate, to_markdown
    from holdfast.report.table_exports import export
    from holdfast.reproduction.outcome import is_reproduction

    load_plugins(plugin)
    if (folder / "federation.toml").exists():
        folder = folder / "server" / "run"
    if live:
        if tables is not None or figures is not None:
            raise ConfigError(
                "--live writes no tables and no figures; leave out --tables and --figures, or --live"
            )
        return follow_live(folder, port, opened)
    if is_reproduction(folder):
        return _report_reproduction(folder, "md" if markdown else tables, figures, form, out, opened)
    if markdown:
        table = tabulate(by_setting(read_records(folder)))
        print(to_markdown(table), end="")
        if explain:
            print("\n" + "".join(f"* **{title}**: {text}\n" for title, text in explained([table])), end="")
        return
    if tables is not None:
        text = export(by_setting(read_records(folder)), tables)
        if out is None:
            print(text, end="")
        else:
            write_atomically(out, text.encode(errors="replace"))
            print(out)
    if figures is not None:
        for path in write_figures(all_sections(read_records(folder)), figures, form):
            print(path)
    if tables is not None or figures is not None:
        return
    page = write_page(folder, out)
    print(page)
    if opened:
        open_page(page)


def _report_reproduction(
    folder: Path, tables: str | None, figures: Path | None, form: str, out: Path | None, opened: bool
) -> None:
    """Write the page of a reproduction; its tables are files beside it already."""
    from holdfast.report.figure_files import write_figures
    from holdfast.reproduction.outcome import read_outcome
    from holdfast.reproduction.page import chart_sections, write_reproduction

    outcome = read_outcome(folder)
    page = write_reproduction(outcome)
    if figures is not None:
        for path in write_figures(chart_sections(outcome), figures, form):
            print(path)
        return
    written = page.parent / f"table.{({'latex': 'tex'}).get(tables, tables)}" if tables is not None else page
    if not written.exists():
        raise ConfigError(f"--tables {tables}: choose md, latex or csv")
    if out is not None:
        write_atomically(out, written.read_bytes())
    print(out or (written.read_text() if tables is not None else page))
    if opened:
        open_page(page)
