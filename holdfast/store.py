"""What is saved, and when: a run is committed between rounds only, by one atomic rename, after everything it names is on the disk.

    manifest.json                what was asked for, and the plan, threads and device that the bits depend on
    head.json                    the committed round and its state file: the rename of this file is the commit
    state/000012.safetensors     server, aggregator, detector and roster state, and the index of private rows
    rows/000012-00.safetensors   private client rows that changed in round 12
    parts/000012.json            that round's metrics; parts/000012.safetensors its per-client arrays and verdict
    result.json                  the final figures"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from holdfast.core.errors import HoldfastError, RunError
from holdfast.core.types import State


class Store:
    """One run's directory, held by one process at a time."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._lock: int | None = None

    def open(self) -> Store:
        """Create the directory if need be and take its lock; a second process is refused."""
        with _readable(self.path):
            for name in ("state", "rows", "parts"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = None
            raise RunError(f"{self.path} is in use by another process; wait for it or choose another --out") from None
        return self

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, (json.dumps(clean(content), indent=1, sort_keys=True) + "\n").encode())

    def read_json(self, name: str) -> dict[str, Any] | None:
        return read_json(self.path / name)

    def commit(
        self, round: int, state: Mapping[str, Tensor], part: Mapping[str, Any], arrays: Mapping[str, Tensor], rows: RowStore
    ) -> None:
        """Make a round permanent. Until the rename of head.json the previous round is the truth; after it, this one."""
        name = f"{round:06d}"
        index = rows.flush()
        write_tensors(self.path / "parts" / f"{name}.safetensors", arrays)
        self.write_json(f"parts/{name}.json", part)
        write_tensors(self.path / "state" / f"{name}.safetensors", {**state, "rows/index": index})
        self.write_json("head.json", {"round": round, "state": f"state/{name}.safetensors"})
        rows.discard()
        for old in (self.path / "state").glob("*.safetensors"):
            if old.stem != name:
                old.unlink(missing_ok=True)

    def head(self) -> tuple[int, State] | None:
        """The committed round and its state; None when nothing was ever committed."""
        head = self.read_json("head.json")
        if head is None:
            return None
        try:
            return int(head["round"]), load_file(self.path / head["state"])
        except (OSError, KeyError, ValueError) as error:
            raise RunError(f"{self.path}: the committed state cannot be read ({error})") from None

    def parts(self, last: int) -> list[dict[str, Any]]:
        """The metrics of the committed rounds."""
        found = [read_json(self.path / "parts" / f"{r:06d}.json") for r in range(1, last + 1)]
        return [part for part in found if part is not None]

    def arrays(self, round: int) -> State:
        path = self.path / "parts" / f"{round:06d}.safetensors"
        return load_file(path) if path.exists() else {}


class RowStore:
    """Private rows of clients on disk: files of rows, and an index of where each client's newest row is.

    Only clients that took part have a row. New rows go to new files; the index changes at a commit. Files are opened for the rows that
    are asked for and closed again, so that what is mapped does not pile up in memory."""

    def __init__(self, path: Path, index: Tensor | None = None):
        self.path = path
        self.place: dict[int, tuple[str, int]] = {}
        if index is not None:
            self.place = {int(c): (f"{int(r):06d}-{int(s):02d}", int(i)) for c, r, s, i in index.tolist()}
        self.staged: dict[int, tuple[str, int]] = {}
        self._files = 0
        self.round = 0

    def begin(self, round: int) -> None:
        """Start a round afresh; what an unfinished one left is not referenced and will be overwritten."""
        self.staged, self._files, self.round = {}, 0, round

    def discard(self) -> None:
        """Remove files that no committed row needs."""
        used = {name for name, _ in self.place.values()}
        for file in self.path.glob("*.safetensors"):
            if file.stem not in used:
                file.unlink(missing_ok=True)

    def present(self, ids: Tensor) -> Tensor:
        return torch.tensor([int(c) in self.staged or int(c) in self.place for c in ids], dtype=torch.bool)

    def read(self, ids: Tensor) -> State:
        """The rows of these clients (all must be present), stacked in the order given."""
        wanted: dict[str, list[tuple[int, int]]] = {}
        for position, client in enumerate(ids.tolist()):
            name, row = self.staged.get(client) or self.place[client]
            wanted.setdefault(name, []).append((position, row))
        out: State = {}
        for name, places in wanted.items():
            with safe_open(self.path / f"{name}.safetensors", framework="pt") as file:
                for field in file.keys():
                    view = file.get_slice(field)
                    if field not in out:
                        shape = view.get_shape()[1:]
                        out[field] = torch.empty(len(ids), *shape, dtype=view[0:1].dtype)
                    for position, row in places:
                        out[field][position] = view[row : row + 1][0]
        return out

    def stage(self, ids: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write new rows; they are read from now on and become permanent with the next commit."""
        if not state or not len(ids):
            return
        name = f"{self.round:06d}-{self._files:02d}"
        self._files += 1
        write_tensors(self.path / f"{name}.safetensors", state, durable=False)
        self.staged.update({int(client): (name, row) for row, client in enumerate(ids)})

    def flush(self) -> Tensor:
        """Put staged rows durably on disk and give the index to commit, int64[clients, 4]: client, round, file, row."""
        self.place |= self.staged
        self._compact()
        for name in {name for name, _ in self.staged.values()}:
            with open(self.path / f"{name}.safetensors", "rb") as file:
                os.fsync(file.fileno())
        if self.staged:
            _sync_folder(self.path)
        self.staged = {}
        rows = [(client, *(int(n) for n in name.split("-")), row) for client, (name, row) in sorted(self.place.items())]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)

    def _compact(self) -> None:
        """When most rows in the files are outdated, gather the live rows of the worst files into a new one."""
        live: dict[str, list[int]] = {}
        for client, (name, _) in self.place.items():
            live.setdefault(name, []).append(client)
        new = {name for name, _ in self.staged.values()}
        sparse = [name for name, clients in live.items() if name not in new and 4 * len(clients) < self._height(name)]
        movers = torch.tensor(sorted(c for name in sparse for c in live[name]), dtype=torch.int64)
        if len(sparse) >= 8:
            self.stage(movers, self.read(movers))
            self.place |= self.staged

    def _height(self, name: str) -> int:
        with safe_open(self.path / f"{name}.safetensors", framework="pt") as file:
            return int(file.get_slice(next(iter(file.keys()))).get_shape()[0])


def write_tensors(path: Path, tensors: Mapping[str, Tensor], durable: bool = True) -> None:
    write_atomically(path, save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}), durable)


def write_atomically(path: Path, content: bytes, durable: bool = True) -> None:
    """All of it or nothing: a temporary file, synced, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with _readable(path):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            _sync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None


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
def _readable(path: Path) -> Iterator[None]:
    """The system's refusals in words."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise HoldfastError(f"the disk is full: could not write {path}; free some space, then `holdfast resume`") from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise HoldfastError(f"cannot write {path}: {error.strerror}; choose another --out") from None
        raise
