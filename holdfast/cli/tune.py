"""`holdfast tune`: equally many trials for every method, then a table of test figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.app import (
    AsJson,
    Changes,
    DataDir,
    Device,
    Memory,
    PlanName,
    Plugins,
    PrecisionName,
    Retry,
    Track,
    Workers,
    app,
    load_plugins,
    only_json,
    print_json,
    to_stderr,
    to_stdout,
)
from holdfast.cli.progress import Follow
from holdfast.cli.runs import engine_options, new_folder
from holdfast.cli.sweeps import say_failed

if TYPE_CHECKING:
    from holdfast.tuning.tune import Tuned


@app.command()
def tune(
    config: Annotated[Path, typer.Argument(show_default=False)],
    budget: Annotated[
        int, typer.Option("--budget", metavar="N", help="Trials of every method.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Directory of the comparison; default: a new one under runs/."),
    ] = None,
    under_attack: Annotated[
        bool, typer.Option("--under-attack", help="Tune against each attack apart, not without any.")
    ] = False,
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
    as_json: AsJson = False,
) -> int:
    """Compare methods fairly: N trials each, chosen by validation data, reported on test data.

    CONFIG is one experiment or a sweep over methods, attacks, seeds and settings. Every line of its table has
    N trials, drawn from the ranges of the method (`holdfast show ditto`) and of the learning rate. A section
    \\[tune] names other ranges; where it leaves fewer combinations, all of them are tried. Trials are played
    on a seed of their own and without an attack, unless --under-attack.

    data.split.validation must be above 0: what is chosen is chosen by the benign clients' validation data,
    never by test data. The choice is then played under the seeds of the sweep (default: three) and its
    attacks; --track tells of these runs, not of the trials.

    The same command goes on where it was stopped. Files: trials.csv, tuned.toml (a sweep that repeats the
    report), report/.

    \b
    Examples:
      holdfast tune sweep.toml --budget 8 --out runs/fair
      holdfast tune sweep.toml --budget 8 --under-attack --device cuda
      holdfast tune config.toml --budget 4 --set data.split.train=0.65 --set data.split.validation=0.1

    """
    with only_json(as_json):
        from holdfast.experiment.config import assign, read_config
        from holdfast.tracking import chosen, tracked
        from holdfast.tuning.tune import Tuning

        load_plugins(plugin)
        chosen(track or [])  # what is missing is said before the trials
        table = read_config(config, changes or [])
        for key, value in engine_options(device, plan, precision, memory, workers, data_dir).items():
            if value is not None:
                assign(table, key, value)
        folder, plugins = out or new_folder(), [str(p) for p in plugin or []]
        tuning = Tuning(table, budget, folder, under_attack)
        with _continued(folder):
            with Follow(
                to_stderr(), figure="validation/accuracy"
            ) as follow:  # nobody looks at a trial's test figures
                follow.say(f"{len(tuning.cells)} trials, at most {budget} for each line of the table")
                choices = tuning.try_all(follow.watch(), plugins, retry)
            with Follow(to_stderr()) as follow, tracked(track or [], follow.watch()) as watch:
                follow.say(f"the report, on seeds {', '.join(map(str, tuning.search.seeds))}")
                tuned = tuning.report(choices, watch, plugins, retry)
    return _finish(tuned, as_json)


def _finish(tuned: Tuned, as_json: bool) -> int:
    from holdfast.report.table import to_rich

    failed = [run_status for run_status in tuned.statuses if run_status.status == "failed"]
    if as_json:
        print_json(tuned.plain())
        return 1 if failed else 0
    console = to_stdout()
    console.print()
    console.print(to_rich(tuned.table()))
    console.print(f"\n{tuned.words()}\n", markup=False, soft_wrap=True)
    console.print(f"trials      {tuned.path / 'trials.csv'}", markup=False, soft_wrap=True)
    console.print(f"this again  holdfast sweep {tuned.path / 'tuned.toml'}", markup=False, soft_wrap=True)
    console.print(f"page        holdfast report {tuned.path / 'report'}", markup=False, soft_wrap=True)
    if failed:
        say_failed(failed)
    return 1 if failed else 0


@contextmanager
def _continued(folder: Path) -> Iterator[None]:
    """Ctrl-C: what was committed stays, and the user is told how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        to_stderr().print(f"interrupted; the same command with --out {folder} continues it", markup=False)
        raise typer.Exit(130) from None
