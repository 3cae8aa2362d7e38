"""`holdfast demo` runs the demonstration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.app import Opened, app, open_page, to_stderr, to_stdout
from holdfast.cli.runs import resumable
from holdfast.interactive.progress import Follow


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory of the runs; default: a new one under runs/.")
    ] = None,
    opened: Opened = False,
) -> None:
    """Run a demonstration in half a minute: four methods, with and without attackers, as a table and a page.

    It needs no files: the data is 1,797 handwritten digits that come with Holdfast.

    \b
    Example:
      holdfast demo --open
    """
    from holdfast.api import fresh_folder
    from holdfast.demo import runner as job

    console, folder = to_stderr(), out or fresh_folder()
    console.print(job.INTRODUCTION + "\n", markup=False)
    with Follow(console) as follow, resumable(folder):
        page = job.run_demo(folder, follow.watch())
    table, words = job.summary(folder, to_stdout().width)
    to_stdout().print(table)
    print(f"\n{words}\n\npage   {page}\nruns   {folder}\nrerun  holdfast run {job.CONFIG} --out runs/again")
    if opened:
        open_page(page)
