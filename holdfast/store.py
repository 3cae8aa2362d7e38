"""What is saved, and when: a run is committed between rounds only, by one atomic rename, after everything it names is on the disk.

    manifest.json                what was asked for, and the plan, threads and device that the bits depend on
    head.json                    the committed round and its state file: the rename of this file is the commit
    state/000012.safetensors     server, aggregator, detector and roster state, and the index of private rows
    rows/records                 private client rows, one record each; rows/fields.json says what a record holds
    parts/000012.json            that round's metrics; parts/000012.safetensors its per-client arrays and verdict
    result.json                  the final figures"""

from __future__ import annotations

import errno
import fcntl
import heapq
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from holdfast.core.errors import HoldfastError, RunError
from holdfast.core.types import State

_FOLDERS = ("state", "rows", "parts")
_LOCKS: set[int] = set()  # descriptors of all locks that this process holds


class Store:
    """One run's directory, held by one process at a time."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._lock: int | None = None

    def open(self) -> Store:
        """Create the directory if need be and take its lock; a second process is refused."""
        with readable(self.path):
            for name in _FOLDERS:
                (self.path / name).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = None
            raise RunError(f"{self.path} is in use by another process; wait for it or choose another --out") from None
        _LOCKS.add(self._lock)
        for folder in (self.path, *(self.path / name for name in _FOLDERS)):
            for left_over in folder.glob(".*.writing"):  # by a process that was killed
                left_over.unlink(missing_ok=True)
        return self

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            _LOCKS.discard(self._lock)
            self._lock = None

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_json(self.path / name, content)

    def read_json(self, name: str) -> dict[str, Any] | None:
        return read_json(self.path / name)

    def commit(
        self, round: int, state: Mapping[str, Tensor], part: Mapping[str, Any], arrays: Mapping[str, Tensor], rows: RowStore
    ) -> None:
        """Make a round permanent."""
        self.prepare(round, state, part, arrays, rows)
        self.seal(round, rows)

    def prepare(
        self, round: int, state: Mapping[str, Tensor], part: Mapping[str, Any], arrays: Mapping[str, Tensor], rows: RowStore
    ) -> None:
        """Put all of a round on the disk; its state file comes last, so where that is, everything is."""
        name = f"{round:06d}"
        index = rows.flush()
        write_tensors(self.path / "parts" / f"{name}.safetensors", arrays)
        self.write_json(f"parts/{name}.json", part)
        write_tensors(self.path / "state" / f"{name}.safetensors", {**state, "rows/index": index})

    def seal(self, round: int, rows: RowStore | None = None) -> None:
        """Until this rename of head.json the previous round is the truth; after it, this one."""
        name = f"{round:06d}"
        self.write_json("head.json", {"round": round, "state": f"state/{name}.safetensors"})
        if rows is not None:
            rows.settle()
        for old in (self.path / "state").glob("*.safetensors"):
            if old.stem != name:
                old.unlink(missing_ok=True)

    def catch_up(self, round: int) -> None:
        """Seal this round if it is ready and the next one. Experiments that are played together seal a round when all are ready, so if
        one has, what the others prepared is what they would play again."""
        head = self.read_json("head.json")
        if head is not None and head.get("round") == round - 1 and (self.path / "state" / f"{round:06d}.safetensors").exists():
            self.seal(round)

    def head(self) -> tuple[int, State] | None:
        """The committed round and its state; None when nothing was ever committed."""
        head = self.read_json("head.json")
        while head is not None:
            try:
                return int(head["round"]), read_tensors(self.path / head["state"])
            except (KeyError, TypeError, ValueError):
                raise RunError(f"{self.path / 'head.json'} is damaged: it names no round or no state file") from None
            except FileNotFoundError:
                newer = self.read_json("head.json")  # a reader without the lock may meet a commit
                if newer == head:
                    raise RunError(f"{self.path}: the committed state {head['state']} is missing") from None
                head = newer
        return None

    def parts(self, last: int) -> list[dict[str, Any]]:
        """The metrics of the committed rounds."""
        found = [read_json(self.path / "parts" / f"{r:06d}.json") for r in range(1, last + 1)]
        return [part for part in found if part is not None]

    def arrays(self, round: int) -> State:
        try:
            return read_tensors(self.path / "parts" / f"{round:06d}.safetensors")
        except FileNotFoundError:
            return {}


def let_go_of_locks() -> None:
    """In a child of the process that holds them: a lock is free only when all who inherited it have closed it."""
    for lock in _LOCKS:
        os.close(lock)
    _LOCKS.clear()


class _Column(NamedTuple):
    """One field of a record: where its bytes lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class RowStore:
    """Private rows of clients on disk: one file of records of equal size, and an index of which record is whose.

    Only clients that took part have a record. A new row goes to a record that no committed row uses, and the record it replaces is free
    once the commit is done: the file holds the live rows and at most one round's more, and nothing ever has to be moved."""

    def __init__(self, path: Path, index: Tensor | None = None):
        self.path, self.file = path, path / "records"
        self.place: dict[int, int] = {} if index is None else dict(index.tolist())
        """The committed record of each client."""
        self.staged: dict[int, int] = {}
        """Records written since; they are read first."""
        self._before: dict[int, int] = {}
        """What `keep` found staged: it is not overwritten, so that an exchange that fails can be taken back."""
        self._end = max(self.place.values(), default=-1) + 1
        self._free = sorted(set(range(self._end)) - set(self.place.values()))  # a heap: the lowest first, so that the file stays short
        self._columns: dict[str, _Column] = {}

    def begin(self) -> None:
        """Start a round afresh: what an unfinished one wrote is forgotten."""
        self.keep()
        for record in self.staged.values():
            heapq.heappush(self._free, record)
        self.staged, self._before = {}, {}

    def keep(self) -> None:
        """What was staged so far stays: `undo` takes back only what comes after."""
        for client, record in self._before.items():
            if self.staged.get(client) != record:
                heapq.heappush(self._free, record)
        self._before = dict(self.staged)

    def undo(self) -> None:
        for client, record in self.staged.items():
            if self._before.get(client) != record:
                heapq.heappush(self._free, record)
        self.staged = dict(self._before)

    def present(self, ids: Tensor) -> Tensor:
        return torch.tensor([client in self.staged or client in self.place for client in ids.tolist()], dtype=torch.bool)

    def read(self, ids: Tensor) -> State:
        """The rows of these clients (all must be present), stacked in the order given."""
        records = [self.staged[client] if client in self.staged else self.place[client] for client in ids.tolist()]
        if not records:
            return {}
        columns = self._known()
        size = max(column.stop for column in columns.values())
        out = {name: np.empty((len(records), column.stop - column.start), dtype=np.uint8) for name, column in columns.items()}
        try:
            for start in range(0, len(records), 64):  # few at a time: what was touched stays in memory until the map is closed
                part = slice(start, start + 64)
                mapped = np.memmap(self.file, dtype=np.uint8, mode="r", shape=(max(records) + 1, size))
                for name, column in columns.items():
                    out[name][part] = mapped[records[part], column.start : column.stop]
                del mapped
        except (OSError, ValueError) as error:
            raise RunError(f"{self.file}: private rows cannot be read ({error})") from None
        return {name: torch.from_numpy(out[name]).view(c.dtype).view(-1, *c.shape) for name, c in columns.items()}

    def stage(self, ids: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write new rows; they are read from now on and become permanent with the next commit."""
        if not state or not len(ids):
            return
        rows = {name: value.detach().cpu().reshape(len(ids), -1).contiguous() for name, value in state.items()}
        columns = self._settled({name: (value.dtype, tuple(value.shape[1:])) for name, value in state.items()})
        size = max(column.stop for column in columns.values())
        with readable(self.file), open(self.file, "r+b") as file:
            for i, client in enumerate(ids.tolist()):
                record = self._record(client)
                for name, column in columns.items():
                    file.seek(record * size + column.start)
                    file.write(rows[name][i].view(torch.uint8).numpy().data)

    def flush(self) -> Tensor:
        """Put staged rows durably on disk and give the index to commit, int64[clients, 2]: client, record."""
        if self.staged:
            with readable(self.file), open(self.file, "rb") as file:
                os.fsync(file.fileno())
        merged = self.place | self.staged
        index = np.empty((len(merged), 2), dtype=np.int64)
        index[:, 0], index[:, 1] = list(merged.keys()), list(merged.values())
        return torch.from_numpy(index[index[:, 0].argsort()])

    def settle(self) -> None:
        """The commit is done: staged rows are the committed ones, and what they replace is free."""
        self.keep()
        for client in self.staged.keys() & self.place.keys():
            heapq.heappush(self._free, self.place[client])
        self.place |= self.staged
        self.staged, self._before = {}, {}

    def _record(self, client: int) -> int:
        """Where a client's new row goes: never over a committed one, nor over one of an earlier exchange."""
        if client not in self.staged or self.staged[client] == self._before.get(client):
            if not self._free:
                self._free.append(self._end)
                self._end += 1
            self.staged[client] = heapq.heappop(self._free)
        return self.staged[client]

    def _known(self) -> dict[str, _Column]:
        """What a record holds, from the disk if need be."""
        if not self._columns:
            written = read_json(self.path / "fields.json")
            try:
                self._columns = _lay_out({n: (getattr(torch, f["dtype"]), tuple(f["shape"])) for n, f in (written or {})["fields"].items()})
            except (AttributeError, KeyError, TypeError):
                raise RunError(f"{self.path / 'fields.json'} is missing or damaged: private rows cannot be read") from None
        return self._columns

    def _settled(self, fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, _Column]:
        """The same for rows to be written; the first rows of a run decide, and say so on disk."""
        if not self.place and not self.staged:
            self._columns = _lay_out(fields)
            with readable(self.file):
                self.file.touch()  # now, so that the folder is synced with it
            written = {n: {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)} for n, (dtype, shape) in fields.items()}
            write_json(self.path / "fields.json", {"fields": written})
        if self._known() != _lay_out(fields):
            raise RunError(f"{self.path}: a client's private state has other fields or shapes than the rows before it: {sorted(fields)}")
        return self._columns


def _lay_out(fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, _Column]:
    """Fields end to end, by name."""
    out, start = {}, 0
    for name, (dtype, shape) in sorted(fields.items()):
        stop = start + math.prod(shape) * dtype.itemsize
        out[name] = _Column(dtype, shape, start, stop)
        start = stop
    return out


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # a copy each: safetensors refuses tensors that share memory, and two names for one tensor is no mistake of a method
    own = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    write_atomically(path, save(own))


def read_tensors(path: Path) -> State:
    """Into memory, not mapped: the file may be deleted or replaced."""
    try:
        return load(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(clean(content), indent=1, sort_keys=True) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """All of it or nothing: a temporary file, synced, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")
    with readable(path):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """An object from a file; None when there is no such file."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} cannot be read: it holds no object")
    return content


def clean(value: Any) -> Any:
    """JSON has no NaN and no infinity: both become null."""
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """The system's refusals in words."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space; `holdfast resume` goes on with a run that has begun"
            raise HoldfastError(f"the disk is full: could not write {path}; {hint}") from None
        raise HoldfastError(f"cannot write {path}: {error.strerror or error}; choose another --out") from None
