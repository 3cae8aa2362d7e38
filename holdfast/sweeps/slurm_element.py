"""What an element of a SLURM array runs: `holdfast sweep --shard I/N` in a process of its own, again and
again until its cells have ended.

submitit writes the element to a file, and the job reads that file; so it holds plain data only, and this
module imports nothing that takes long. On the signal that SLURM sends before the time of a job ends, submitit
calls `checkpoint`, queues the element again and exits. The process of Holdfast is then killed, which is safe
at any moment: a round is committed by one rename, and the next process goes on from the last one."""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import RunError

PAUSE = 60.0
"""Seconds before a process is started again: the lock of a node that died may live on for a while, and a
signal to the whole job may end the process of Holdfast before submitit has seen it."""
STARTS = 10
_STOPPED = (-signal.SIGTERM, -signal.SIGUSR2)
"""Exit codes of a process that SLURM stopped together with its element."""


@dataclass
class Element:
    """Shard `number` of `of` of the sweep in `folder`. `words` is its command, `where` the directory in which
    the user submitted it."""

    words: list[str]
    folder: str
    number: int
    of: int
    where: str
    pause: float = PAUSE

    def __call__(self) -> None:
        """Run until all cells of the shard have ended; raise an error if one failed, or if another process
        keeps some of them."""
        for start in range(STARTS):
            if start:
                time.sleep(self.pause)
            code = self._run()
            if code in _STOPPED:
                print(f"stopped by {signal.Signals(-code).name}; it goes on from its last round", flush=True)
                continue
            if code != 0:
                raise RunError(f"{shlex.join(self.words)} ended with exit code {code}; its log says why")
            left = self._unfinished()
            if not left:
                return
            print(f"{len(left)} cells are held by another process, such as {left[0]}", flush=True)
        raise RunError(
            f"shard {self.number}/{self.of} of {self.folder} is not finished after {STARTS} starts;"
            f" `holdfast resume {shlex.quote(self.folder)}` completes it"
        )

    def checkpoint(self) -> Any:
        """Return what is queued again: the same command, which continues."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _run(self) -> int:
        print(shlex.join(self.words), flush=True)
        process = subprocess.Popen(self.words, cwd=self.where)
        try:
            return process.wait()
        finally:  # also where submitit exits from its signal handler
            if process.poll() is None:
                process.kill()
                process.wait()

    def _unfinished(self) -> list[str]:
        """Return the labels of this shard's cells that have not ended."""
        from holdfast.storage.status import run_status
        from holdfast.sweeps.folder import block, listed

        cells = block(listed(Path(self.folder)), self.number, self.of)
        statuses = [run_status(Path(self.folder) / cell["folder"], cell["label"]) for cell in cells]
        return [status.label for status in statuses if not status.done]
