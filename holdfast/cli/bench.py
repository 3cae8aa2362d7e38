"""`holdfast bench` times training on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.app import AsJson, app, only_json, print_json, to_stderr, to_stdout


@app.command()
def bench(
    work: Annotated[
        list[str] | None,
        typer.Option(
            "--work", metavar="NAME", help="Time only this workload, for example digits-mlp-100; repeatable."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use fewer repetitions.")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Number of PyTorch threads.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda; each has its own workloads.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure how much faster Holdfast trains on this machine than a plain PyTorch loop over clients.

    Both train the same clients, in turns. Each row of the table is one plan: a way to step a stack of
    clients.

    \b
    Examples:
      holdfast bench --work digits-mlp-100
      holdfast bench --device cuda --json

    """
    from rich.table import Table

    with only_json(as_json):
        from holdfast.bench.steps import run_bench

        console = to_stderr()
        result = run_bench(
            work or None, quick, threads, lambda line: console.print(line, markup=False, style="dim"), device
        )
    if as_json:
        return print_json(result)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("work", "plan", "seconds", "times as fast"):
        table.add_column(title, justify="right" if title in ("seconds", "times as fast") else "left")
    for row in result["rows"]:
        table.add_row(row["work"], row["plan"], f"{row['seconds']:.4g}", f"{row['ratio']:.2f}")
    to_stdout().print(table)
