"""`holdfast sweep --slurm`: submit a sweep to a cluster, or print what would be submitted."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.app import command_line, print_json, print_line, to_stdout
from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.sweeps.slurm import SlurmSweep

Slurm = Annotated[
    str | None,
    typer.Option(
        "--slurm",
        metavar="TEXT",
        help='Submit the sweep to a SLURM cluster: "partition=gpu gpus=8 time=02:00:00".',
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="With --slurm: print the script and submit nothing.")]


def submit_sweep(
    text: str | None,
    dry_run: bool,
    table: dict[str, Any],
    out: Path | None,
    shard: str,
    plugins: list[Path] | None,
    track: list[str] | None,
    retry: bool,
    as_json: bool,
) -> bool:
    """Submit what is left of the sweep; return False, without a word, where nothing is left."""
    from holdfast.api import fresh_folder
    from holdfast.sweeps.slurm import slurm_sweep
    from holdfast.tracking.following import chosen

    if text is None:
        raise ConfigError(
            '--dry-run goes with --slurm: --slurm "partition=gpu gpus=8 time=02:00:00" --dry-run'
        )
    if shard != "1/1":
        raise ConfigError(f"--shard {shard}: leave it out with --slurm, which gives every element its shard")
    chosen(track or [])
    asked = slurm_sweep(text, table, out or fresh_folder(), plugins or [], track or [], retry)
    left = asked.left()
    if dry_run:
        _print_script(asked, as_json)
    elif left:
        _say_submitted(asked, asked.submit(), plugins or [], as_json)
    return dry_run or left > 0


def _print_script(asked: SlurmSweep, as_json: bool) -> None:
    commands = [shlex.join(element.words) for element in asked.elements()]
    if as_json:
        print_json({"run_dir": str(asked.out), "script": asked.script(), "commands": commands})
        return
    print(asked.script())
    print(f"# nothing was submitted; {len(commands)} elements share {len(asked.cells)} cells, and run:")
    for command in commands:
        print(f"# {command}")


def _say_submitted(asked: SlurmSweep, job: str, plugins: list[Path], as_json: bool) -> None:
    from holdfast.core.registry import plugin_options

    of = len(asked.jobs)
    if as_json:
        print_json({"run_dir": str(asked.out), "job": job, "elements": of, "logs": str(asked.logs)})
        return
    lines = {
        "job": f"{job}: {of} {'element' if of == 1 else 'elements'} for {len(asked.cells)} cells",
        "run directory": str(asked.out),
        "logs": str(asked.logs),
        "state": command_line("report", asked.out, "--live") + plugin_options(plugins),
        "queue": f"squeue --job {job}",
        "complete": command_line("resume", asked.out) + plugin_options(plugins),
    }
    for name, value in lines.items():
        print_line(to_stdout(), f"{name:15} {value}")
