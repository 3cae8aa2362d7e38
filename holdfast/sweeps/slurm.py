"""A sweep as an array job of SLURM, through submitit. Every element of the array runs one shard of the sweep
with one GPU (or none) by the command `holdfast sweep --shard I/N`; the shards share the folder of the sweep
and its locks.

OUT/sweep.json           the cells, written before the job is submitted: no shard can run another grid
OUT/slurm/sweep.toml     the config as it was submitted, which the elements read; the user's file may change
OUT/slurm/               the script, the logs of the elements, and submitit's files
"""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, RunError
from holdfast.core.files import expand, plain_disk_errors, write_atomically
from holdfast.core.registry import plugin_options
from holdfast.core.toml import to_toml
from holdfast.experiment.config import Config
from holdfast.sweeps.folder import SweepFolder
from holdfast.sweeps.grid import configs
from holdfast.sweeps.slurm_element import Element
from holdfast.sweeps.slurm_text import SlurmRequest, read_request

FOLDER = "slurm"
_LONGEST_WARNING = 90
"""Seconds before the end of its time at which an element is told, so that it is queued again."""


@dataclass
class SlurmSweep:
    """A sweep that can be submitted, or printed as the script that would be."""

    out: Path
    request: SlurmRequest
    cells: list[tuple[str, Config]]
    config: str
    """The config as TOML."""
    plugins: Sequence[str] = ()
    track: Sequence[str] = ()
    retry: bool = False
    cluster: str = "slurm"
    jobs: list[Any] = field(default_factory=list)
    """submitit's jobs, one for each element, once they are submitted."""

    @property
    def logs(self) -> Path:
        return self.out / FOLDER

    def elements(self) -> list[Element]:
        """Return what every element of the array runs."""
        of = self.request.elements(len(self.cells))
        return [
            Element(self._words(number, of), str(self.out), number, of, str(Path.cwd()))
            for number in range(1, of + 1)
        ]

    def script(self) -> str:
        """Return the script that `submit` hands to sbatch; writes nothing."""
        slurm = _submitit().slurm.slurm

        class Unsent(slurm.SlurmExecutor):  # type: ignore[name-defined]
            """Needs no cluster, because it submits nothing."""

            @classmethod
            def affinity(cls) -> int:
                return 1

        executor = Unsent(folder=self.logs, max_num_timeout=self.request.requeues)
        executor.update_parameters(**self._parameters())
        of = self.request.elements(len(self.cells))
        if of > 1:
            executor.parameters["map_count"] = of
        return str(executor._make_submission_file_text(executor._submitit_command_str, ""))

    def left(self) -> int:
        """Return how many cells have something left to run."""
        folder = SweepFolder(self.out, self.cells)
        folder.check()
        statuses = [(place, place.run_status()) for place in folder.cells]
        return sum(
            not status.done or place.to_extend() or (self.retry and status.status == "failed")
            for place, status in statuses
        )

    def submit(self) -> str:
        """Submit the array and return the number of its job."""
        executor = self._executor()
        folder = SweepFolder(self.out, self.cells)
        with folder.claim():
            folder.write()
        with plain_disk_errors(self.logs):
            self.logs.mkdir(exist_ok=True)
        write_atomically(self.logs / "sweep.toml", self.config.encode())
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it also raises
                self.jobs = executor.submit_array(self.elements())
        except (OSError, RuntimeError) as error:
            raise RunError(f"slurm: the job was not submitted: {_reason(error)}") from None
        return str(self.jobs[0].job_id).partition("_")[0]

    def described(self, job: str) -> dict[str, str]:
        """Return what a user needs to know of a submitted job: titles and lines."""
        of, out = len(self.jobs), shlex.quote(str(self.out))
        plugins = plugin_options(self.plugins)
        return {
            "job": f"{job}: {of} {'element' if of == 1 else 'elements'} for {len(self.cells)} cells",
            "run directory": str(self.out),
            "logs": str(self.logs),
            "state": f"holdfast report {out} --live{plugins}",
            "queue": f"squeue --job {job}",
            "complete": f"holdfast resume {out}{plugins}",
        }

    def _executor(self) -> Any:
        submitit = _submitit()
        if self.cluster == "local":
            local = submitit.LocalExecutor(folder=self.logs, max_num_timeout=self.request.requeues)
            local.update_parameters(timeout_min=self.request.minutes, signal_delay_s=self._warning())
            return local
        try:
            executor = submitit.SlurmExecutor(folder=self.logs, max_num_timeout=self.request.requeues)
        except RuntimeError:
            raise ConfigError(
                "slurm: this machine has no `srun`, so nothing can be submitted from it; do it on a login"
                " node of the cluster, or print the script with --dry-run"
            ) from None
        executor.update_parameters(**self._parameters())
        return executor

    def _parameters(self) -> dict[str, Any]:
        """Return what was asked for, in submitit's names; what it has no name for is handed on to sbatch."""
        asked = self.request
        found: dict[str, Any] = {
            "time": asked.minutes,
            "signal_delay_s": self._warning(),
            "array_parallelism": asked.gpus or asked.elements(len(self.cells)),
            "wckey": None,  # submitit's own is refused by clusters that check it
            "additional_parameters": {
                "job_name": f"holdfast-{self.out.name}",
                "requeue": True,
                **asked.options,
            },
        }
        if asked.gpus:
            found["gpus_per_node"] = f"{asked.gpu_type}:1" if asked.gpu_type else 1
        if asked.cpus:
            # srun does not inherit it from sbatch since SLURM 22.05
            found |= {"cpus_per_task": asked.cpus, "srun_args": ["--cpus-per-task", str(asked.cpus)]}
        if asked.setup:
            found["setup"] = [asked.setup]
        return found

    def _warning(self) -> int:
        return min(_LONGEST_WARNING, 30 * self.request.minutes)

    def _words(self, number: int, of: int) -> list[str]:
        command = [sys.executable, "-m", "holdfast.cli", "sweep", str(self.logs / "sweep.toml")]
        options = [word for plugin in self.plugins for word in ("--plugin", plugin)]
        options += [word for name in self.track for word in ("--track", name)]
        options += ["--retry"] if self.retry else []
        return [*command, "--out", str(self.out), "--shard", f"{number}/{of}", *options]


def slurm_sweep(
    text: str,
    table: Mapping[str, Any],
    out: Path,
    plugins: Sequence[str | Path] = (),
    track: Sequence[str] = (),
    retry: bool = False,
    cluster: str = "slurm",
) -> SlurmSweep:
    """Check everything that can be checked before a job is submitted. Elements with a GPU train on it, unless
    the config names a device."""
    request = read_request(text)
    engine = table.get("engine", {})
    if request.gpus and isinstance(engine, Mapping) and "device" not in engine:
        table = {**table, "engine": {**engine, "device": "cuda"}}
    cells = configs(table)
    if request.gpus and cells[0][1].engine.device == "cpu":
        raise ConfigError(
            f"slurm: gpus={request.gpus} asks for GPUs, but the device is cpu; leave out gpus (jobs=N shares"
            " the sweep over CPUs), or name another device"
        )
    if len(cells) == 1 and not cells[0][0]:
        raise ConfigError(
            "slurm: the config has no [sweep] section with a list, so there is nothing to share"
        )
    if "%" in str(out.resolve()):
        raise ConfigError(f"slurm: {out} has a % in its path, which SLURM replaces; choose another --out")
    files = [str(expand(plugin, "--plugin").resolve()) for plugin in plugins]
    return SlurmSweep(out.resolve(), request, cells, _as_toml(table, cells), files, track, retry, cluster)


def _as_toml(table: Mapping[str, Any], cells: Sequence[tuple[str, Config]]) -> str:
    """Return the config as a file that gives the same cells in another process."""
    try:
        text = to_toml(table)
        same = [(label, config.plain()) for label, config in configs(tomllib.loads(text))] == [
            (label, config.plain()) for label, config in cells
        ]
    except (TypeError, ValueError, ConfigError):
        same = False
    if not same:
        raise ConfigError(
            "slurm: the config holds Python objects, or lists with None, which a file cannot; give parts,"
            " models and data by their names, and register your own in a file for --plugin"
        )
    return text


def _submitit() -> Any:
    try:
        import submitit
        import submitit.slurm.slurm
    except ImportError:
        raise ConfigError(
            "slurm: submitting needs the package submitit; pip install 'holdfast[slurm]' installs it"
        ) from None
    return submitit


def _reason(error: Exception) -> str:
    """What sbatch said, on one line."""
    return " ".join(str(error).split())[:500] or "sbatch gave no reason"
