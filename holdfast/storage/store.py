"""What is saved, and when: a run is committed between rounds only, by one atomic rename, after everything it
names is on the disk.

`prepare` collects what a round of one run has to save. `commit_all` writes it for all runs that go together,
waits for the disk (for many of them by one flush of the file system), and then renames their heads. The
simulator does this in a thread of its own while the next round trains (write_behind.py), with at most one
round on its way; `settle_all` then tells the runs, in the thread that trains. A killed process loses no
round whose head was renamed; a machine that loses its power may lose or garble what was written and not yet
committed, which no head names.

    manifest.json                what was asked for, and the plan, threads and device that the bits depend on
    data-3f9a2c1b77e0.safetensors   data that was handed over in Python, named by its digest; a sweep has it
                                 in its own folder
    start.safetensors            the start model, where it came from a file, which may be gone later
    head.json                    the committed round and its state file: the rename of this file is the
                                 commit; in a federation also the length of its ledger and its head
    state/000012.safetensors     server, aggregator, detector and participation state, and the index of
                                 private rows
    rows/records                 private client rows, one record each; rows/fields.json says what a record
                                 holds
    parts/000012.json            that round's metrics; parts/000012.safetensors its per-client arrays and
                                 verdict
    result.json                  the final figures
    failure.json, traceback.txt  why a cell of a sweep cannot go on (status.py)
    tracking.json                the run's place in trackers and the last round sent to them (tracking/)

One process has a run at a time: it holds an flock on `lock`, which ends with the process, however it ends.
Between machines that share the directory this relies on the file system passing flock on, as NFS (version 4,
or 3 with lockd), Lustre mounted with -o flock, GPFS and CephFS do; where locks are refused, so is the run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from holdfast.core.errors import InUse, RunError, in_print
from holdfast.core.files import (
    as_json,
    lock,
    plain_disk_errors,
    replace_file,
    sync,
    sync_file_system,
    unlock,
    write_atomically,
    write_beside,
    write_json,
)
from holdfast.core.memory import physical_memory
from holdfast.core.reading import digest_of_file, is_whole, read_json, read_whole
from holdfast.core.types import State
from holdfast.storage.checks import broken_arrays, broken_part, broken_result
from holdfast.storage.client_state import RowStore
from holdfast.storage.host_copy import HostCopy

_FOLDERS = ("state", "rows", "parts")
_MANY = 8  # runs in one commit from which one flush of the file system is cheaper than one of each file


class Store:
    """One run's directory, held by one process at a time."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._lock: int | None = None
        self._unsynced: set[Path] = set()
        self._next: Path | None = None  # the head of the round that is being committed
        self.committed = -1
        """The last round that this session knows to be committed; -1 where there is none."""
        self.on_its_way: Future[None] | None = None
        """The commit that a thread is doing, until `settle_all`; that thread alone writes here meanwhile."""
        self.also: Callable[[], Mapping[str, Any]] = dict
        """Further entries for the head file: a federation names its ledger there."""
        self.follows = False
        """Whether another process writes this run, of several that run it together; this one then writes
        private rows alone."""

    def open(self) -> Store:
        """Create the directory if need be and take its lock; a second process is refused."""
        with plain_disk_errors(self.path):
            for name in _FOLDERS:
                (self.path / name).mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.path / "lock")
        if self._lock is None:
            raise InUse(f"{self.path} is in use by another process; wait for it or choose another --out")
        for folder in (self.path, *(self.path / name for name in _FOLDERS)):
            for left_over in folder.glob(".*.writing"):  # left by a process that was killed
                left_over.unlink(missing_ok=True)
        return self

    def close(self) -> None:
        if self.on_its_way is not None:
            wait([self.on_its_way])
        if self._next is not None:  # left by a commit that did not happen
            self._next.unlink(missing_ok=True)
            self._next = None
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        if not self.follows:
            write_json(self.path / name, content)

    def read_json(self, name: str) -> dict[str, Any] | None:
        return read_json(self.path / name)

    def write_start(self, initial: Tensor) -> None:
        """Write the start model; it is on disk before round 0 is committed."""
        path = self.path / "start.safetensors"
        if self.follows:
            return
        replace_file(path, _pack({"initial": initial}))
        self._unsynced |= {path, self.path}

    def start(self) -> Tensor | None:
        """The start model of a committed run; without a commit it may be of another attempt."""
        path = self.path / "start.safetensors"
        if not (self.path / "head.json").exists() or not path.exists():
            return None
        try:
            return read_tensors(path)["initial"]
        except KeyError:
            raise RunError(f"{path} is damaged: it holds no start model") from None

    def prepare(
        self,
        round: int,
        state: Mapping[str, Tensor],
        part: Mapping[str, Any],
        arrays: Mapping[str, Tensor],
        rows: RowStore,
        last: bool = False,
    ) -> PreparedRound:
        """Collect all of a round; what cannot be written is an error here. Its state file comes last, so
        where that is, everything is."""
        name = f"{round:06d}"
        content: dict[str, bytes | State] = {
            f"parts/{name}.safetensors": _checked(arrays),
            f"parts/{name}.json": as_json(part),
            self.state_file(round): _checked({**state, "rows/index": rows.index()}),
        }
        written = (rows.file,) if rows.staged else ()
        return PreparedRound(self, round, rows, content, written, last)

    def write(self, ready: PreparedRound) -> None:
        """Write the files of a round, not yet its head. What names rows comes after them."""
        if ready.rows is not None:
            ready.rows.write()
        for file, content in ready.content.items():
            path = self.path / file
            replace_file(path, content if isinstance(content, bytes) else _pack(content, ready.copied))
            self._unsynced |= {path, path.parent}
        self._unsynced |= set(ready.written)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        for path in sorted(
            self._unsynced, key=lambda path: (path.is_dir(), path)
        ):  # files before the folders that name them
            sync(path)

    def sync_file_system(self) -> bool:
        """The same for everything on its file system; by the lock's handle, which was open before anything
        was written."""
        with plain_disk_errors(self.path):
            return self._lock is not None and sync_file_system(self._lock)

    def synced(self) -> None:
        self._unsynced = set()

    def write_head(self, round: int) -> None:
        head = {"round": round, "state": self.state_file(round), **self.also()}
        self._next = write_beside(self.path / "head.json", as_json(head))
        self._unsynced.add(self._next)

    @staticmethod
    def state_file(round: int) -> str:
        return f"state/{round:06d}.safetensors"

    def digest(self, round: int) -> str | None:
        """The SHA-256 of the state file of a round, as `sha256sum` prints it; None where it is gone, as those
        of earlier rounds are."""
        try:
            return digest_of_file(self.path / self.state_file(round))
        except FileNotFoundError:
            return None

    def commit(self, round: int) -> None:
        """Commit: until this rename the previous round counts; after it, this one."""
        assert self._next is not None
        with plain_disk_errors(self.path / "head.json"):
            os.replace(self._next, self.path / "head.json")
        self._next = None
        self._unsynced.add(self.path)

    def tidy(self, round: int) -> None:
        """Remove all states but the committed one."""
        if self.follows:
            return
        for old in (self.path / "state").glob("*.safetensors"):
            if old.stem != f"{round:06d}":
                old.unlink(missing_ok=True)

    def catch_up(self, committed: Collection[int]) -> None:
        """Commit a later round if it is ready and others of the group have committed it. Experiments that
        run together commit a round when all are ready, so what this one prepared is what it would compute
        again. Where rounds come back from another machine, several may have come at once."""
        head = self.round()
        later = [round for round in committed if head is not None and round > head]
        ready = [round for round in later if (self.path / self.state_file(round)).exists()]
        if ready:
            commit_all([PreparedRound(self, max(ready))])

    def round(self) -> int | None:
        """The committed round; None when nothing was ever committed."""
        head = self.read_json("head.json")
        if head is not None and not is_whole(head.get("round")):
            raise self._no_head()
        return None if head is None else head["round"]

    def _no_head(self) -> RunError:
        return RunError(f"{self.path / 'head.json'} is damaged: it names no round or no state file")

    def head(self) -> tuple[int, State] | None:
        """The committed round and its state; None when nothing was ever committed."""
        head = self.read_json("head.json")
        while head is not None:
            if not is_whole(head.get("round")) or not re.fullmatch(
                r"state/\d{6,10}\.safetensors", str(head.get("state"))
            ):
                raise self._no_head()
            try:
                return head["round"], read_tensors(self.path / head["state"])
            except FileNotFoundError:
                newer = self.read_json(
                    "head.json"
                )  # a commit may happen while a reader without the lock reads
                if newer == head:
                    raise RunError(f"{self.path}: the committed state {head['state']} is missing") from None
                head = newer
        return None

    def parts(self, last: int) -> list[dict[str, Any]]:
        """The metrics of the committed rounds."""
        found = [self.part(round) for round in self.rounds(last)]
        return [part for part in found if part is not None]

    def rounds(self, last: int) -> list[int]:
        """The rounds up to this one that have files; a damaged head could claim a billion."""
        names = {file.stem for file in (self.path / "parts").glob("[0-9]*.*")}
        return sorted(
            int(name) for name in names if re.fullmatch(r"\d{6,10}", name) and 1 <= int(name) <= last
        )

    def part(self, round: int) -> dict[str, Any] | None:
        """The metrics of one round; None where there are none."""
        file = self.path / "parts" / f"{round:06d}.json"
        part = read_json(file)
        if part is not None and (broken := broken_part(part, round)):
            raise RunError(f"{file} is damaged: '{broken}' cannot be read")
        return part

    def result(self) -> dict[str, Any] | None:
        """The final figures; None where the run is not finished."""
        file = self.path / "result.json"
        result = read_json(file)
        if result is not None and (broken := broken_result(result)):
            raise RunError(f"{file} is damaged: '{broken}' cannot be read")
        return result

    def arrays(self, round: int) -> State:
        file = self.path / "parts" / f"{round:06d}.safetensors"
        try:
            arrays = read_tensors(file)
        except FileNotFoundError:
            return {}
        if broken := broken_arrays(arrays):
            raise RunError(f"{file} is damaged: '{broken}' cannot be read")
        return arrays


@dataclass(frozen=True)
class PreparedRound:
    """A round that is ready to be written and committed by `commit_all`."""

    store: Store
    round: int
    rows: RowStore | None = None
    content: Mapping[str, bytes | State] = field(default_factory=dict)
    """What to write, by file, in this order."""
    written: tuple[Path, ...] = ()
    """Files of this round that are written already, and not yet on the disk."""
    last: bool = False
    """Whether the run ends with it: what comes after needs it committed."""
    copied: bool = False
    """Whether the tensors are copies, which nobody else has."""

    def size(self) -> int:
        """Bytes that a copy of its tensors needs."""
        files = [file for file in self.content.values() if not isinstance(file, bytes)]
        return sum(value.nbytes for tensors in files for value in tensors.values())

    def copy(self) -> PreparedRound:
        """The same with copies of its tensors in the memory of the host, which no later round changes. Copies
        of private rows, if there are any, are complete too."""
        if self.rows is not None:
            self.rows.wait_for_copies()
        content = {
            file: value if isinstance(value, bytes) else HostCopy(value).wait()
            for file, value in self.content.items()
        }
        return replace(self, content=content, copied=True)


def commit_all(ready: Sequence[PreparedRound]) -> None:
    """Commit runs that go together: no head is renamed before all of them are whole on the disk."""
    write_all(ready)
    settle_all(ready)


def write_all(ready: Sequence[PreparedRound]) -> None:
    """All of a commit that touches the disk."""
    for each in ready:
        each.store.write(each)
    for each in ready:
        each.store.write_head(each.round)
    _wait_for_disk([each.store for each in ready])
    for each in ready:
        each.store.commit(each.round)
    _wait_for_disk([each.store for each in ready])
    for each in ready:
        each.store.tidy(each.round)


def settle_all(ready: Sequence[PreparedRound]) -> None:
    """The commit is done: the rounds count, and the records of rows that they replace are free."""
    for each in ready:
        # of a commit on its way, the rows may know already: their next round began to write
        if each.rows is not None and each.rows.on_its_way is each.store.on_its_way:
            each.rows.settle()
        each.store.committed, each.store.on_its_way = each.round, None


def _wait_for_disk(stores: Sequence[Store]) -> None:
    """Wait for the disk: few runs for each of their files; many runs on one file system for all of it at
    once, which also waits for what other processes wrote."""
    if (
        len(stores) < _MANY
        or len({os.stat(store.path).st_dev for store in stores}) > 1
        or not stores[0].sync_file_system()
    ):
        for store in stores:
            store.sync()
    for store in stores:
        store.synced()


def _checked(tensors: Mapping[str, Tensor]) -> State:
    """The same tensors, if a file can hold them: found out by empty ones."""
    tensors = {name: value.detach() for name, value in tensors.items()}
    save({str(dtype): torch.empty(0, dtype=dtype) for dtype in {value.dtype for value in tensors.values()}})
    return tensors


def _pack(tensors: Mapping[str, Tensor], copied: bool = False) -> bytes:
    # a copy each: safetensors refuses tensors that share memory, and two names for one tensor is no mistake
    # of a method
    return save(dict(tensors) if copied else HostCopy(tensors).wait())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    write_atomically(path, _pack(tensors))


def read_tensors(path: Path) -> State:
    """Read tensors into memory, not mapped: the file may be deleted or replaced."""
    try:
        return load(read_whole(path, physical_memory()))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, MemoryError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read: {in_print(str(error))[:300]}") from None
