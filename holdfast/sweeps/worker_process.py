"""The parent's side of a process that trains units of a sweep (unit_process.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from holdfast.core.errors import in_print
from holdfast.core.own_python import command, variables

Event = dict[str, Any]
_GRACE = 5.0  # seconds for a process that was told to end


class WorkerProcess:
    """One such process. It ends with this object, and with the process that has this object."""

    def __init__(self, environment: Mapping[str, str] | None = None, cores: int = 1):
        self.events: SimpleQueue[Event] = SimpleQueue()
        """What it tells; the last event is `lost`, with the reason."""
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command("holdfast.sweeps.unit_process", "main"),
            env={**variables(), "OMP_NUM_THREADS": str(cores), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C in a terminal is for the parent, which ends its workers
        )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, job: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead, which its last event says
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def next(self, within: float) -> Event | None:
        """The next event; None where there is none within so many seconds."""
        try:
            return self.events.get(timeout=within)
        except Empty:
            return None

    def end(self) -> None:
        """End it and the processes that it has started, at once: nothing of it needs to be saved."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError, OSError):  # closed by `end`
            for line in self._process.stdout:
                self.events.put(json.loads(line))
        self.events.put({"event": "lost", "reason": self._last_words()})

    def _last_words(self) -> str:
        """How it ended, and the last line that it printed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        code = self._process.returncode
        if code is None:
            how = "it closed its output"
        elif code < 0:
            killed = code == -signal.SIGKILL
            how = f"it was ended by signal {-code}" + (" (out of memory?)" if killed else "")
        else:
            how = f"it ended with code {code}"
        with suppress(OSError, ValueError):
            self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4096))
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            return f"{how}: {in_print(said[-1])[:300]}" if said else how
        return how
