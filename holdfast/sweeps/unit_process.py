"""A process that trains units of a sweep, one after the other, for a parent that reads what happens.

It reads jobs from its standard input, a line of JSON each, and writes events to its standard output in the
same way; what the code that it runs prints goes to standard error. It ends when its input ends, so it never
outlives its parent. A job names the directory of a sweep and some of its cells. With an `outbox`, the
directory is one that only this process has, and what is committed there is handed out as blocks of bytes."""

from __future__ import annotations

import json
import os
import shutil
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

BEAT = 5.0  # seconds between two signs of life
_ENDED = 3  # exit code where the parent has gone
_own: list[str] = []
"""The folder that only the job under way uses; it is removed where the parent can no longer do it."""
_loaded: set[str] = set()
"""Digests of the plug-ins that were sent and that this process has loaded."""


class Events:
    """Events for the parent, a line of JSON each."""

    def __init__(self, handle: int):
        self._handle, self._lock = handle, threading.Lock()

    def tell(self, event: str, **about: Any) -> None:
        line = memoryview(json.dumps({"event": event, **about}).encode() + b"\n")
        with self._lock:
            while line:
                try:
                    line = line[os.write(self._handle, line) :]
                except BrokenPipeError:
                    os._exit(_ENDED)


def main() -> None:
    """Train what the parent asks for, until it has gone."""
    events = Events(os.dup(1))
    os.dup2(2, 1)
    jobs: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_read_jobs, args=(0, jobs.put), daemon=True).start()
    threading.Thread(target=_beat, args=(events,), daemon=True).start()
    while True:
        job = jobs.get()
        _own[:] = [] if job["scratch"] is None else [job["scratch"]]
        events.tell("began", where=job["where"])
        try:
            _train(job, events)
            events.tell("done", id=job["id"])
        except Exception as error:
            from holdfast.core.errors import HoldfastError
            from holdfast.storage.status import one_line

            traceback.print_exc()
            own = isinstance(error, HoldfastError)
            events.tell("error", id=job["id"], reason=one_line(error), kind=type(error).__name__, own=own)


def _read_jobs(handle: int, put: Callable[[dict[str, Any]], None]) -> None:
    with open(handle, "rb", closefd=False) as lines:
        for line in lines:
            put(json.loads(line))
    for folder in _own:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(_ENDED)  # the parent has gone: what it does not have is of no use


def _beat(events: Events) -> None:
    while True:
        threading.Event().wait(BEAT)
        events.tell("alive")


def _train(job: dict[str, Any], events: Events) -> None:
    import torch

    from holdfast.core.registry import load_plugin
    from holdfast.data.cache import ENVIRONMENT
    from holdfast.experiment.runner import RunCallbacks
    from holdfast.sweeps.folder import SweepFolder, read_sweep
    from holdfast.sweeps.runner import Task, run_cells
    from holdfast.sweeps.sending import Sender

    def say(line: str) -> None:
        events.tell("say", line=line)

    def moved(experiment: Any) -> None:
        events.tell("moved", cell=experiment.out.name, round=experiment.committed)

    torch.set_num_threads(max(1, int(job["cores"])))
    if job["cache"] is not None:
        os.environ[ENVIRONMENT] = job["cache"]
    for plugin in job["plugins"]:
        if job["scratch"] is None:
            load_plugin(plugin)
        elif (content := Path(plugin).parent.name) not in _loaded:  # a folder is named by the file's digest
            _loaded.add(content)
            load_plugin(plugin)
    folder = SweepFolder(Path(job["folder"]), read_sweep(Path(job["folder"])))
    sender, watch = None, RunCallbacks(say=say, moved=_rarely(moved))
    if job["outbox"] is not None:
        sender = Sender(folder.path, job["cells"], _Outbox(Path(job["outbox"]), events).put, job["interval"])
        watch = sender.watch(say)
    task = Task(folder, watch, job["plugins"], retry=job["retry"])
    if job["samples"]:
        task.load = _Samples(job["samples"]).load
    try:
        run_cells(task, [place for place in folder.cells if place.path.name in job["cells"]])
    finally:
        if sender is not None:
            sender.send(job["cells"])


def _rarely(moved: Callable[[Any], None]) -> Callable[[Any], None]:
    """Call `moved` only where there is something new: it is called after every exchange."""
    before: dict[int, tuple[int, bool]] = {}

    def changed(experiment: Any) -> None:
        now = experiment.committed, experiment.finished is not None
        if before.get(id(experiment)) != now:
            before[id(experiment)] = now
            moved(experiment)

    return changed


class _Outbox:
    """Blocks of files for the parent, which takes them away."""

    def __init__(self, folder: Path, events: Events):
        self.folder, self.events, self.sent = folder, events, 0
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, files: dict[str, bytes]) -> None:
        from holdfast.sweeps.parcels import pack, write_block

        self.sent += 1
        path = self.folder / f"{self.sent:06d}"
        write_block(pack(files), path)
        self.events.tell("files", path=str(path))


class _Samples:
    """Sample stores that were put into this machine's cache, by the digest that the job names for them."""

    def __init__(self, digests: list[list[str]]):
        self.digests = {name: digest for name, digest in digests}
        self._loaded: dict[str, Any] = {}

    def load(self, configs: list[Any]) -> list[Any]:
        from holdfast.experiment.build import sample_key

        return [self._samples(self.digests[sample_key(config)]) for config in configs]

    def _samples(self, digest: str) -> Any:
        from holdfast.core.errors import DataError
        from holdfast.data.samples import Samples
        from holdfast.data.shipped import find
        from holdfast.data.sources.base import tensor_of

        if digest not in self._loaded:
            found = find(digest)
            arrays: dict[str, Any] = {name: tensor_of(array) for name, array in found.arrays.items()}
            facts: dict[str, Any] = {
                name: tuple(fact) if isinstance(fact, list) else fact for name, fact in found.facts.items()
            }
            samples = Samples(**arrays, **facts)
            if samples.digest != digest:
                raise DataError(f"the samples that were sent do not have the digest {digest[:12]}")
            self._loaded[digest] = samples
        return self._loaded[digest]
