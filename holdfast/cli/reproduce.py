"""`holdfast reproduce`: a paper's tables and figures, played again."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.app import (
    AsJson,
    Changes,
    DataDir,
    Device,
    Memory,
    Opened,
    PlanName,
    Plugins,
    PrecisionName,
    Retry,
    Track,
    Workers,
    app,
    load_plugins,
    only_json,
    open_page,
    print_json,
    to_stderr,
    to_stdout,
)
from holdfast.cli.progress import Follow
from holdfast.cli.runs import engine_options

if TYPE_CHECKING:
    from holdfast.reproduction.experiments import Grid, Wanted
    from holdfast.reproduction.outcome import Outcome
    from holdfast.reproduction.study import Study


@app.command()
def reproduce(
    paper: Annotated[
        str | None, typer.Argument(help="fedcap, fedas, c-pfl, fedcom or fedcpa.", show_default=False)
    ] = None,
    what: Annotated[
        str | None,
        typer.Argument(help="A table or figure: table-1, I, fig-7. Default: all.", show_default=False),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", help="Seeds of every cell, from 0 on; default: what the study says."),
    ] = None,
    scale: Annotated[
        str, typer.Option("--scale", help="smoke (seconds), quick (minutes) or full (the paper's setting).")
    ] = "quick",
    variant: Annotated[
        str, typer.Option("--variant", help="card (what the papers say), authors (their code) or both.")
    ] = "card",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="AXIS=LABEL,...", help="Part of the table; repeatable."),
    ] = None,
    stand_ins: Annotated[
        bool, typer.Option("--stand-ins", help="Other data for what cannot be had, also at full scale.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory; default: reproductions/PAPER/TABLE-SCALE.")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Say what would be played, and stop.")] = False,
    retry: Retry = False,
    changes: Changes = None,
    device: Device = None,
    plan: PlanName = None,
    precision: PrecisionName = None,
    memory: Memory = None,
    workers: Workers = None,
    plugin: Plugins = None,
    data_dir: DataDir = None,
    track: Track = None,
    opened: Opened = False,
    as_json: AsJson = False,
) -> int:
    """Play a paper's table or figure again and hold it against what is printed.

    Without PAPER: what there is. The page says whether the paper's claims hold, shows our figures beside the
    printed ones, and what was done differently. All cells of a table are one batched computation, except
    where seconds are the result.

    The same command goes on where it was stopped.

    \b
    Examples:
      holdfast reproduce
      holdfast reproduce fedcap table-1 --scale quick --open
      holdfast reproduce fedcap I --scale full --seeds 3 --only dataset=CIFAR-10 --device cuda
      holdfast reproduce fedcom --scale smoke

    """
    if paper is None:
        return _list(as_json)
    with only_json(as_json):
        from holdfast.experiment.config import parse_changes
        from holdfast.reproduction.experiments import Wanted
        from holdfast.reproduction.study import find
        from holdfast.tracking import chosen

        load_plugins(plugin)
        chosen(track or [])  # what is missing is said before anything is played
        settings = dict(parse_changes(changes or [])) | _given(
            engine_options(device, plan, precision, memory, workers, data_dir)
        )
        wanted = Wanted(scale, seeds, variant, tuple(only or ()), tuple(settings.items()), stand_ins)
        studies = find(paper, what)
        outcomes = []
        for study in studies if not dry else []:
            folder = _folder(study, wanted, out, len(studies) > 1)
            outcomes.append(_run(study, wanted, folder, [str(p) for p in plugin or []], retry, track or []))
        index = _index(outcomes)
    if dry:
        return _describe(studies, wanted, as_json)
    return _finish(outcomes, index, as_json, opened)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _folder(study: Study, wanted: Wanted, out: Path | None, several: bool) -> Path:
    paper, _, what = study.key.partition("/")
    if out is not None:
        return out / what if several else out
    return Path("reproductions") / paper / f"{what}-{wanted.scale}"


def _run(
    study: Study, wanted: Wanted, folder: Path, plugins: list[str], retry: bool, track: list[str]
) -> Outcome:
    from holdfast.reproduction.experiments import Grid
    from holdfast.reproduction.outcome import reproduce as run_study
    from holdfast.reproduction.page import write_reproduction
    from holdfast.tracking import tracked

    console = to_stderr()
    console.print(f"{study.paper}, {study.name}: {_experiments(Grid(study, wanted))}", markup=False)
    with ExitStack() as following:

        def watch() -> Any:
            follow = following.enter_context(Follow(console))
            return following.enter_context(tracked(track, follow.watch()))

        try:
            outcome = run_study(study, wanted, folder, watch, plugins, retry)
        except KeyboardInterrupt:
            console.print("interrupted; the same command goes on", markup=False)
            raise typer.Exit(130) from None
    write_reproduction(outcome)
    return outcome


def _experiments(grid: Grid) -> str:
    many = len(grid.to_run())
    return f"{many} experiment{'s' if many > 1 else ''}"


def _index(outcomes: list[Outcome]) -> Path | None:
    """A page that leads to all of them, where there are several."""
    from holdfast.reproduction.page import write_index

    return write_index(outcomes, outcomes[0].path.parent) if len(outcomes) > 1 else None


def _finish(outcomes: list[Outcome], index: Path | None, as_json: bool, opened: bool) -> int:
    from holdfast.report.table import to_rich
    from holdfast.reproduction.sheet import sheet_of, to_table

    if as_json:
        print_json({"reproductions": [_plain(outcome) for outcome in outcomes]})
    console = to_stdout()
    for outcome in outcomes if not as_json else []:
        console.print()
        beside = " (printed)" if outcome.study.printed else ""
        console.print(
            to_rich(to_table(sheet_of(outcome)), f"{outcome.study.paper}, {outcome.study.name}: ours{beside}")
        )
        for ours, _ in outcome.findings:
            console.print(f"  {ours.words:<32} {ours.claim.says}", markup=False, soft_wrap=True)
        console.print(f"page   {outcome.path / 'report.html'}", markup=False, soft_wrap=True)
    if index is not None and not as_json:
        console.print(f"all    {index}", markup=False, soft_wrap=True)
    if opened:
        open_page(index or outcomes[0].path / "report.html")
    return 1 if any(outcome.missing for outcome in outcomes) else 0


def _plain(outcome: Outcome) -> dict[str, Any]:
    from holdfast.reproduction.sheet import sheet_of

    boxes = [box for row in sheet_of(outcome).boxes for box in row if box is not None]
    return {
        "study": outcome.study.key,
        "folder": str(outcome.path),
        "missing": outcome.missing,
        "cells": [
            {
                **box.at,
                "metric": box.metric,
                "ours": list(box.ours.seeds) if box.ours else [],
                "printed": box.printed.mean if box.printed else None,
            }
            for box in boxes
        ],
        "claims": [
            {"says": ours.claim.says, "here": ours.words, "in print": said.words}
            for ours, said in outcome.findings
        ],
    }


def _list(as_json: bool) -> int:
    from rich.table import Table

    from holdfast.reproduction.experiments import Grid, Wanted
    from holdfast.reproduction.study import keys, read

    studies = [read(key) for key in keys()]
    many = {
        study.key: [len(Grid(study, Wanted(scale=scale)).to_run()) for scale in ("quick", "full")]
        for study in studies
    }
    if as_json:
        print_json(
            [{"study": s.key, "title": s.title, "claims": [c.says for c in s.claims]} for s in studies]
        )
        return 0
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("what", "", "quick", "full"):
        table.add_column(column, justify="right" if column in ("quick", "full") else "left", overflow="fold")
    for study in studies:
        table.add_row(study.key.replace("/", " "), study.title, *map(str, many[study.key]))
    console = to_stdout()
    console.print(table)
    console.print(
        "\nThe numbers are experiments. `holdfast reproduce fedcap table-1` plays one, `... fedcap` all of a"
        " paper."
    )
    return 0


def _describe(studies: list[Study], wanted: Wanted, as_json: bool) -> int:
    from holdfast.reproduction.experiments import Grid

    grids = [Grid(study, wanted) for study in studies]
    if as_json:
        print_json(
            [
                {
                    "study": g.study.key,
                    "cells": [label for label, _ in g.to_run()],
                    "stand_ins": g.substitutes,
                }
                for g in grids
            ]
        )
        return 0
    console = to_stdout()
    for grid in grids:
        cells = grid.to_run()
        rounds = sorted({config.train.rounds for _, config in cells})
        data = sorted({config.data.name for _, config in cells})
        console.print(
            f"{grid.study.paper}, {grid.study.name}: {_experiments(grid)} of {' or '.join(map(str, rounds))}"
            f" rounds on {', '.join(data)}",
            markup=False,
            soft_wrap=True,
        )
        for axis, labels in grid.labels.items():
            console.print(
                f"  {axis:<10} {', '.join(label or '(nothing)' for label in labels)}",
                markup=False,
                soft_wrap=True,
            )
        if grid.substitutes:
            console.print(f"  stand-ins  {'; '.join(grid.substitutes)}", markup=False, soft_wrap=True)
    return 0
