"""What a Ray worker does with one unit of a sweep: it puts everything into a folder of its own, has a process
of Holdfast train there (unit_process.py), and hands out what that tells and commits.

Only bytes and plain data go in and out. Nothing here imports torch, so a Ray worker takes little memory."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import DataError, HoldfastError, RunError
from holdfast.core.files import HOST
from holdfast.core.version import __version__
from holdfast.data.cache import ENVIRONMENT
from holdfast.data.shipped import find, keep
from holdfast.sweeps.parcels import take_block, unpack, write_files
from holdfast.sweeps.worker_process import WorkerProcess

Told = tuple[bytes, bytes]
"""An event as JSON, and the block of files that belongs to it."""
Plugin = tuple[str, str, bytes]
"""Name, SHA-256 and content of a file."""
SentSamples = tuple[str, str, list[tuple[str, Any]]]
"""Digest, facts as JSON, and a reference to each array in the object store."""

_SILENCE = 20.0  # seconds without an event, after which the driver is told what is wrong
_worker: tuple[WorkerProcess, tuple[str, ...]] | None = None
"""The process of this Ray worker, and the environment that it was started in."""


def train_unit(
    spec: bytes, block: bytes, plugins: Sequence[Plugin], samples: Sequence[SentSamples]
) -> Iterator[Told]:
    """Train one unit, and yield what happens. What is wrong with this machine is a `lost` event, so that
    another one may try."""
    with _scratch() as folder:
        last = yield from _trained(folder, spec, block, plugins, samples)
    yield last  # the driver may end this process as soon as it has it


def _trained(
    folder: Path, spec: bytes, block: bytes, plugins: Sequence[Plugin], samples: Sequence[SentSamples]
) -> Generator[Told, None, Told]:
    """Yield what happens in this folder; return the last event."""
    try:
        job = json.loads(spec)
        check_versions(job["holdfast"])
        write_files(unpack(block), folder / "sweep")
        files = [str(write_plugin(plugin, folder / "plugins")) for plugin in plugins]
        cache = fetch_samples(samples, folder)
        job |= {
            "folder": str(folder / "sweep"),
            "outbox": str(folder / "outbox"),
            "plugins": files,
            "cache": cache,
            "where": _where(),
            "scratch": str(folder),
        }
        process = _process(int(job["cores"]))
        process.send(job)
    except (HoldfastError, OSError) as error:
        return _event(event="lost", reason=f"{_where()}: {error}")
    if (other := importlib.metadata.version("torch")) != job["torch"]:
        words = f"PyTorch {other} here, {job['torch']} where the sweep was started: the bits may differ"
        yield _event(event="say", line=words)
    try:
        return (yield from _followed(process))
    except GeneratorExit:  # the driver does not want the rest
        _end_process()
        raise


def _followed(process: WorkerProcess) -> Generator[Told, None, Told]:
    """Yield what the process tells, until it is done with the unit; return the last event."""
    while True:
        event = process.next(_SILENCE)
        if event is None:
            continue
        files = take_block(Path(event.pop("path"))) if event["event"] == "files" else b""
        if event["event"] == "lost":
            _end_process()
        told = json.dumps(event).encode(), files
        if event["event"] in ("done", "error", "lost"):
            return told
        yield told


def check_versions(holdfast: str) -> None:
    if holdfast != __version__:
        raise RunError(
            f"Holdfast is {__version__} here and {holdfast} where the sweep was started; install the same"
        )


def write_plugin(plugin: Plugin, folder: Path) -> Path:
    """Write a plug-in whose content has the digest that was announced; its folder is named by it."""
    name, digest, content = plugin
    if hashlib.sha256(content).hexdigest() != digest:
        raise RunError(f"the plug-in {name} was altered on its way: its digest is not {digest[:12]}")
    path = folder / digest / Path(name).name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def fetch_samples(samples: Sequence[SentSamples], folder: Path) -> str | None:
    """Put samples into this machine's cache, unless it has them already. Where the cache cannot be written,
    they go to the folder, which is returned."""

    def put() -> None:
        for digest, facts, arrays in samples:
            keep(digest, json.loads(facts), partial(fetched, arrays))
            find(digest)

    try:
        put()
        return None
    except DataError:
        os.environ[ENVIRONMENT] = str(folder / "cache")
        put()
        return str(folder / "cache")


def fetched(arrays: Sequence[tuple[str, Any]]) -> dict[str, np.ndarray]:
    """The arrays from the object store of this machine, which gets them once for all its workers."""
    import ray

    return {name: ray.get(reference) for name, reference in arrays}


def _process(cores: int) -> WorkerProcess:
    """The process of this Ray worker. It is kept for the next unit, if that has the same GPU and cores."""
    global _worker
    wanted = (os.environ.get("CUDA_VISIBLE_DEVICES", ""), str(cores))
    if _worker is None or _worker[1] != wanted:
        _end_process()
        _worker = WorkerProcess(cores=cores), wanted
    return _worker[0]


def _end_process() -> None:
    global _worker
    if _worker is not None:
        _worker[0].end()
        _worker = None


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for one unit. Those of processes of this machine that were killed are removed."""
    base = Path(tempfile.gettempdir())
    for old in base.glob(f"holdfast-unit.{HOST}.*"):
        pid = old.name.split(".")[-2]
        if pid.isdecimal() and Path("/proc/self").exists() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"holdfast-unit.{HOST}.{os.getpid()}."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _where() -> str:
    import ray

    return f"{HOST} {ray.util.get_node_ip_address()} (process {os.getpid()})"


def _event(**about: Any) -> Told:
    return json.dumps(about).encode(), b""
