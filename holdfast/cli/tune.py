"""`holdfast tune` gives every method the same number of trials, then reports on test data."""

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
    Devices,
    Explain,
    Memory,
    PlanName,
    Plugins,
    PrecisionName,
    Ray,
    RayInterval,
    Retry,
    Track,
    Workers,
    app,
    check_explain,
    command_line,
    launcher,
    load_plugins,
    only_json,
    print_explanations,
    print_json,
    print_line,
    to_stderr,
    to_stdout,
)
from holdfast.cli.runs import engine_options, new_folder, trained_on
from holdfast.cli.sweeps import say_failed
from holdfast.interactive.progress import Follow

if TYPE_CHECKING:
    from holdfast.tuning.tune import Tuned


@app.command()
def tune(
    config: Annotated[
        Path, typer.Argument(help="TOML file of one experiment or a sweep.", show_default=False)
    ],
    budget: Annotated[
        int,
        typer.Option("--budget", metavar="N", help="Number of trials for every method.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Directory of the comparison; default: a new one under runs/."),
    ] = None,
    under_attack: Annotated[
        bool,
        typer.Option("--under-attack", help="Tune under each attack separately, instead of without attack."),
    ] = False,
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
    explain: Explain = False,
    as_json: AsJson = False,
) -> int:
    """Compare methods fairly: N trials each, chosen on validation data, reported on test data.

    CONFIG is one experiment or a sweep over methods, attacks, seeds and settings. Every line of its table
    gets N trials, drawn from the ranges of the method (`holdfast show ditto`) and of the learning rate. A
    section \\[tune] sets other ranges; if it allows fewer combinations, all of them are tried. Trials use
    their own seed and no attack, unless --under-attack is given.

    data.split.validation must be above 0: settings are chosen on the validation data of benign clients, never
    on test data. The chosen settings then run with the seeds of the sweep (default: three) and its attacks.
    --track logs these runs, not the trials.

    The same command continues a comparison that was stopped. It writes trials.csv, tuned.toml (a sweep that
    repeats the report) and report/.

    \b
    Examples:
      holdfast tune sweep.toml --budget 8 --out runs/fair
      holdfast tune sweep.toml --budget 8 --under-attack --device cuda
      holdfast tune sweep.toml --budget 8 --devices all
      holdfast tune config.toml --budget 4 --set data.split.train=0.65 --set data.split.validation=0.1


    """
    check_explain(explain, as_json)
    with only_json(as_json):
        from holdfast.core.registry import plugin_options
        from holdfast.experiment.config_tables import assign, read_config
        from holdfast.tracking import chosen, tracked
        from holdfast.tuning.tune import Tuning

        load_plugins(plugin)
        chosen(track or [])  # report a missing tracker before the trials
        table = read_config(config, changes or [])
        machines = launcher(ray, ray_interval, devices, device)
        options = engine_options(device or trained_on(machines), plan, precision, memory, workers, data_dir)
        for key, value in options.items():
            if value is not None:
                assign(table, key, value)
        folder, plugins = out or new_folder(), [str(p) for p in plugin or []]
        tuning = Tuning(table, budget, folder, under_attack, machines)
        with _continued(folder):
            with Follow(
                to_stderr(), figure="validation/accuracy"
            ) as follow:  # test data stays unseen during trials
                follow.say(f"{len(tuning.cells)} trials, at most {budget} for each line of the table")
                choices = tuning.try_all(follow.watch(), plugins, retry)
            with Follow(to_stderr()) as follow, tracked(track or [], follow.watch()) as watch:
                follow.say(f"running the report with seeds {', '.join(map(str, tuning.search.seeds))}")
                tuned = tuning.report(choices, watch, plugins, retry)
    return _finish(tuned, as_json, plugin_options(plugins), explain)


def _finish(tuned: Tuned, as_json: bool, plugins: str, explain: bool) -> int:
    from holdfast.report.column_help import explained
    from holdfast.report.table import to_rich

    failed = [run_status for run_status in tuned.statuses if run_status.status == "failed"]
    if as_json:
        print_json(tuned.plain())
        return 1 if failed else 0
    console = to_stdout()
    console.print()
    console.print(to_rich(tuned.table()))
    if explain:
        print_explanations(console, explained([tuned.table()]))
    console.print(f"\n{tuned.words()}\n", markup=False, soft_wrap=True)
    print_line(console, f"trials      {tuned.path / 'trials.csv'}")
    if (tuned.path / "tuned.toml").exists():
        print_line(console, f"repeat      {command_line('sweep', tuned.path / 'tuned.toml')}{plugins}")
    print_line(console, f"page        {command_line('report', tuned.path)}{plugins}")
    if failed:
        say_failed(failed)
    return 1 if failed else 0


@contextmanager
def _continued(folder: Path) -> Iterator[None]:
    """On Ctrl-C, say how to continue; committed rounds stay."""
    try:
        yield
    except KeyboardInterrupt:
        to_stderr().print(f"interrupted; the same command with --out {folder} continues it", markup=False)
        raise typer.Exit(130) from None
