"""`holdfast sweep --slurm`: submit a sweep to a cluster, or print what would be submitted."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.app import print_json
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
) -> tuple[str, dict[str, Any]] | None:
    """Submit what is left of the sweep. Return what to print, as text and for --json; None where nothing is
    left."""
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
        return _script(asked)
    if not left:
        return None
    job = asked.submit()
    lines = [f"{title:15} {line}" for title, line in asked.described(job).items()]
    content = {"run_dir": str(asked.out), "job": job, "elements": len(asked.jobs), "logs": str(asked.logs)}
    return "\n".join(lines), content


def print_submitted(said: tuple[str, dict[str, Any]], as_json: bool) -> int:
    text, content = said
    if as_json:
        print_json(content)
    else:
        print(text)
    return 0


def _script(asked: SlurmSweep) -> tuple[str, dict[str, Any]]:
    script, commands = asked.script(), [shlex.join(element.words) for element in asked.elements()]
    ended = f"# nothing was submitted; {len(commands)} elements share {len(asked.cells)} cells, and run:"
    text = "\n".join([script, ended, *(f"# {command}" for command in commands)])
    return text, {"run_dir": str(asked.out), "script": script, "commands": commands}
