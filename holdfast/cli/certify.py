"""`holdfast certify` says how far a backdoor may go before a smoothed prediction changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.app import AsJson, Plugins, app, load_plugins, only_json, print_json, to_stdout
from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.diagnostics.certify import Certified


@app.command()
def certify(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.", show_default=False)],
    attackers: Annotated[
        list[int] | None,
        typer.Option("--attackers", metavar="N", help="How many attackers; repeatable; default: 1."),
    ] = None,
    radius: Annotated[
        list[float] | None,
        typer.Option(
            "--radius", metavar="R", help="Radius to report; repeatable; default: ten up to the largest."
        ),
    ] = None,
    draws: Annotated[int, typer.Option("--draws", metavar="N", help="Noisy models that vote.")] = 1000,
    noise: Annotated[
        float | None, typer.Option("--noise", help="Their standard deviation; default: the run's own.")
    ] = None,
    alpha: Annotated[
        float, typer.Option("--alpha", help="Probability that the bounds of a sample are wrong.")
    ] = 0.001,
    hoeffding: Annotated[
        bool, typer.Option("--hoeffding", help="The paper's bounds, in place of Clopper and Pearson's.")
    ] = False,
    attacked: Annotated[
        int | None,
        typer.Option(
            "--attacked", metavar="ROUND", help="Round of the attack; default: the last, the worst."
        ),
    ] = None,
    scale: Annotated[float, typer.Option("--scale", help="Factor on the attackers' updates.")] = 1.0,
    poisoned: Annotated[
        float, typer.Option("--poisoned", help="Share of each batch that attackers poison.")
    ] = 1.0,
    lipschitz: Annotated[
        float | None,
        typer.Option(
            "--lipschitz", help="Lipschitz constant of the gradient; known for logistic regression."
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", metavar="N", help="Only the first N test samples.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write a row for each test sample (.csv).")
    ] = None,
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Certify a run under the wrapper crfl against backdoors (Xie et al., ICML 2021).

    Models with fresh noise vote on each test sample. Printed is the share of the samples that are predicted
    right, and would have been had so many attackers, in one round, trained on samples up to that far from the
    true ones.

    \b
    Examples:
      holdfast certify runs/mine --attackers 1 --attackers 3
      holdfast certify runs/mine --radius 0.01 --radius 0.1 --poisoned 0.05 --out votes.csv

    """
    if out is not None and (out.suffix.lower() != ".csv" or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out: {out} must end in .csv and its folder must exist")
    with only_json(as_json):
        from holdfast.diagnostics.certify import certify as certified
        from holdfast.results.run import Run

        load_plugins(plugin)
        found = certified(
            Run(folder),
            attackers or [1],
            draws,
            noise,
            alpha,
            "hoeffding" if hoeffding else "clopper-pearson",
            attacked,
            scale,
            poisoned,
            lipschitz,
            samples,
        )
        table = found.accuracy(radius)
        if out is not None:
            found.votes.to_csv(out, index=False)
    if as_json:
        print_json({"smoothed": found.smoothed, "certified": table.to_dict(orient="records")})
    else:
        _print(found, radius, out)


def _print(found: Certified, radius: list[float] | None, out: Path | None) -> None:
    from rich.table import Table

    frame = found.accuracy(radius)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in frame.columns:
        table.add_column(column, justify="right")
    for many, far, accuracy, rate in frame.itertuples(index=False):
        table.add_row(f"{many}", f"{far:.4g}", f"{100 * accuracy:.1f} %", f"{100 * rate:.1f} %")
    console = to_stdout()
    console.print(
        f"{len(found.votes)} test samples, {100 * found.smoothed:.1f} % right by the smoothed prediction",
        markup=False,
    )
    console.print(table)
    if out is not None:
        print(out)
