"""`holdfast reproduce` repeats tables and figures of papers."""

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
    Devices,
    Memory,
    Opened,
    PlanName,
    Plugins,
    PrecisionName,
    Ray,
    RayInterval,
    Retry,
    Track,
    Workers,
    app,
    launcher,
    load_plugins,
    only_json,
    open_page,
    print_json,
    to_stderr,
    to_stdout,
)
from holdfast.cli.runs import engine_options, trained_on
from holdfast.interactive.progress import Follow

if TYPE_CHECKING:
    from holdfast.reproduction.experiments import StudyGrid, StudyRequest
    from holdfast.reproduction.outcome import Outcome
    from holdfast.reproduction.study import Study
    from holdfast.sweeps.runner import Launcher


@app.command()
def reproduce(
    paper: Annotated[
        str | None, typer.Argument(help="Paper: fedcap, fedas, c-pfl, fedcom or fedcpa.", show_default=False)
    ] = None,
    what: Annotated[
        str | None,
        typer.Argument(
            help="Table or figure: table-1, I, fig-7; default: all of the paper.", show_default=False
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", help="Number of seeds, counted from 0; default: that of the scale."),
    ] = None,
    scale: Annotated[
        str, typer.Option("--scale", help="smoke (seconds), quick (minutes) or full (the paper's setting).")
    ] = "quick",
    variant: Annotated[
        str,
        typer.Option(
            "--variant", help="Follow the text (paper), the released code (authors), or run both (both)."
        ),
    ] = "paper",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="AXIS=LABEL,...", help="Run only a part of the table; repeatable."),
    ] = None,
    stand_ins: Annotated[
        bool,
        typer.Option(
            "--stand-ins", help="Replace datasets that cannot be downloaded by others, also at full scale."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Directory to write; default: reproductions/PAPER/TABLE-SCALE."),
    ] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="List the experiments and stop.")] = False,
    devices: Devices = None,
    ray: Ray = None,
    ray_interval: RayInterval = None,
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
    """Reproduce a table or figure of a paper and compare it with the published numbers.

    Without PAPER, the command lists all tables and figures. The page says whether the claims of the paper
    hold, shows our numbers beside the published ones, and lists what was done differently. All cells of a
    table run as one batched computation, except where time is the result.

    The same command continues a reproduction that was stopped.

    \b
    Examples:
      holdfast reproduce
      holdfast reproduce fedcap table-1 --scale quick --open
      holdfast reproduce fedcap I --scale full --seeds 3 --only dataset=CIFAR-10
      holdfast reproduce fedcom --scale smoke
      holdfast reproduce fedcap table-1 --scale full --devices all


    """
    if paper is None:
        return _list(as_json)
    with only_json(as_json):
        from holdfast.experiment.config_tables import parse_changes
        from holdfast.reproduction.experiments import StudyRequest
        from holdfast.reproduction.study import find
        from holdfast.tracking import chosen

        load_plugins(plugin)
        chosen(track or [])  # report a missing tracker before anything runs
        machines = launcher(ray, ray_interval, devices, device)
        settings = dict(parse_changes(changes or [])) | _given(
            engine_options(device or trained_on(machines), plan, precision, memory, workers, data_dir)
        )
        request = StudyRequest(scale, seeds, variant, tuple(only or ()), tuple(settings.items()), stand_ins)
        studies = find(paper, what)
        outcomes = []
        for study in studies if not dry else []:
            folder = _folder(study, request, out, len(studies) > 1)
            files = [str(p) for p in plugin or []]
            outcomes.append(_run(study, request, folder, files, retry, track or [], machines))
        index = _index(outcomes)
    if dry:
        return _describe(studies, request, as_json)
    return _finish(outcomes, index, as_json, opened)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _folder(study: Study, request: StudyRequest, out: Path | None, several: bool) -> Path:
    paper, _, what = study.key.partition("/")
    if out is not None:
        return out / what if several else out
    return Path("reproductions") / paper / f"{what}-{request.scale}"


def _run(
    study: Study,
    request: StudyRequest,
    folder: Path,
    plugins: list[str],
    retry: bool,
    track: list[str],
    machines: Launcher | None = None,
) -> Outcome:
    from holdfast.reproduction.experiments import StudyGrid
    from holdfast.reproduction.outcome import reproduce as run_study
    from holdfast.reproduction.page import write_reproduction
    from holdfast.tracking import tracked

    console = to_stderr()
    console.print(f"{study.paper}, {study.name}: {_experiments(StudyGrid(study, request))}", markup=False)
    with ExitStack() as following:

        def watch() -> Any:
            follow = following.enter_context(Follow(console))
            return following.enter_context(tracked(track, follow.watch()))

        try:
            outcome = run_study(study, request, folder, watch, plugins, retry, machines)
        except KeyboardInterrupt:
            console.print("interrupted; the same command continues it", markup=False)
            raise typer.Exit(130) from None
    write_reproduction(outcome)
    return outcome


def _experiments(grid: StudyGrid) -> str:
    many = len(grid.to_run())
    return f"{many} experiment{'s' if many > 1 else ''}"


def _index(outcomes: list[Outcome]) -> Path | None:
    """Write a page with links to all of them, where there are several."""
    from holdfast.reproduction.page import write_index

    return write_index(outcomes, outcomes[0].path.parent) if len(outcomes) > 1 else None


def _finish(outcomes: list[Outcome], index: Path | None, as_json: bool, opened: bool) -> int:
    from holdfast.report.table import to_rich
    from holdfast.reproduction.result_table import result_table, to_table

    if as_json:
        print_json({"reproductions": [_plain(outcome) for outcome in outcomes]})
    console = to_stdout()
    for outcome in outcomes if not as_json else []:
        console.print()
        beside = " (published)" if outcome.study.printed else ""
        console.print(
            to_rich(
                to_table(result_table(outcome)), f"{outcome.study.paper}, {outcome.study.name}: ours{beside}"
            )
        )
        for ours, _ in outcome.claim_results:
            console.print(f"  {ours.words:<32} {ours.claim.says}", markup=False, soft_wrap=True)
        console.print(f"page   {outcome.path / 'report.html'}", markup=False, soft_wrap=True)
    if index is not None and not as_json:
        console.print(f"all    {index}", markup=False, soft_wrap=True)
    if opened:
        open_page(index or outcomes[0].path / "report.html")
    return 1 if any(outcome.missing for outcome in outcomes) else 0


def _plain(outcome: Outcome) -> dict[str, Any]:
    from holdfast.reproduction.result_table import result_table

    cells = [cell for row in result_table(outcome).cells for cell in row if cell is not None]
    return {
        "study": outcome.study.key,
        "folder": str(outcome.path),
        "missing": outcome.missing,
        "cells": [
            {
                **cell.at,
                "metric": cell.metric,
                "ours": list(cell.ours.seeds) if cell.ours else [],
                "printed": cell.printed.mean if cell.printed else None,
            }
            for cell in cells
        ],
        "claims": [
            {"says": ours.claim.says, "here": ours.words, "in print": said.words}
            for ours, said in outcome.claim_results
        ],
    }


def _list(as_json: bool) -> int:
    from rich.table import Table

    from holdfast.reproduction.experiments import StudyGrid, StudyRequest
    from holdfast.reproduction.study import keys, read

    studies = [read(key) for key in keys()]
    many = {
        study.key: [len(StudyGrid(study, StudyRequest(scale=scale)).to_run()) for scale in ("quick", "full")]
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
        "\nThe numbers count experiments at scale quick and full. `holdfast reproduce fedcap table-1` runs"
        " one table, `holdfast reproduce fedcap` all of the paper."
    )
    return 0


def _describe(studies: list[Study], request: StudyRequest, as_json: bool) -> int:
    from holdfast.reproduction.experiments import StudyGrid

    grids = [StudyGrid(study, request) for study in studies]
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
