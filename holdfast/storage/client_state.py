"""Clients' private rows on disk: what a method keeps for each client between its rounds."""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.core.device import PINNED
from holdfast.core.errors import RunError
from holdfast.core.files import plain_disk_errors, write_json
from holdfast.core.reading import is_whole, read_json
from holdfast.core.types import State
from holdfast.storage.host_copy import HostCopy


class _Column(NamedTuple):
    """One field of a record: where its bytes lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class RowStore:
    """Private rows of clients on disk: one file of records of equal size, and an index of which record is
    whose.

    Only clients that took part have a record. A new row goes to a record that no committed row uses, and the
    record it replaces is free once the commit is done: the file holds the live rows and at most one round's
    more (in a round of several exchanges, one exchange's more than that), and nothing ever has to be
    moved.

    A round goes through three stages: its rows are `staged` while it runs, `pending` while another thread
    commits it, and then in `place`. Rows are staged again only once nothing is pending, so the file is no
    longer for that, and every row has the record that it would have without the other thread."""

    def __init__(self, path: Path, index: Tensor | None = None):
        self.path, self.file = path, path / "records"
        self.place: dict[int, int] = {} if index is None else self._places(index)
        """The committed record of each client."""
        self.staged: dict[int, int] = {}
        """Records written since the last commit; they are read first."""
        self.pending: dict[int, int] = {}
        """Records of the round that is being committed."""
        self.on_its_way: Future[None] | None = None
        """Their commit, until `settle`."""
        self.unwritten: dict[int, tuple[HostCopy, int]] = {}
        """Records that the file does not have yet: a copy of them, and the row of that copy. They are written
        with the commit, by a thread that changes nothing here."""
        self._slots: dict[int, int] = {}
        """Records that an engine also has on its device, and where (engine/device_rows.py)."""
        self._free_slots: list[int] = []
        self._reserved: dict[int, int] = {}
        """Records for rows that this process, or another that runs the experiment with it, may stage in the
        exchange that is under way."""
        self._kept: dict[int, int] = {}
        """Records staged before the exchange that is under way: `restore` goes back to them."""
        self._end = max(self.place.values(), default=-1) + 1
        self._free = sorted(
            set(range(self._end)) - set(self.place.values())
        )  # a heap: the lowest first, so that the file stays short
        self._columns: dict[str, _Column] = {}

    def _places(self, index: Tensor) -> dict[int, int]:
        """Read a committed index. A record number far beyond all others is refused: the list of free records
        would fill the memory."""
        if index.dtype != torch.int64 or index.ndim != 2 or index.shape[1] != 2:
            raise RunError(f"{self.path}: the committed index of private rows is damaged")
        place: dict[int, int] = dict(index.tolist())
        if (
            len(place) < len(index)
            or place
            and (min(place.values()) < 0 or max(place.values()) > 1000 + 8 * len(place))
        ):
            raise RunError(f"{self.path}: the committed index of private rows is damaged")
        return place

    def begin(self) -> None:
        """Start a round: what an unfinished one wrote is dropped. What is being committed stays."""
        self.staged, dropped = {}, {*self.staged.values(), *self._kept.values()}
        self._kept = {}
        self._release(dropped)

    def keep(self) -> None:
        """Remember what is staged now: an exchange that fails half way is taken back by `restore`."""
        self.adopt(staged=False)  # of an exchange that failed
        replaced = set(self._kept.values()) - set(self.staged.values())
        self._kept = dict(self.staged)
        self._release(replaced)

    def restore(self) -> None:
        """Go back to what was staged at `keep`."""
        dropped = set(self.staged.values()) - set(self._kept.values())
        self.staged = dict(self._kept)
        self._release(dropped)

    def reserve(self, ids: Tensor) -> None:
        """Choose the records of these clients before their rows are staged: several processes, which stage
        the rows of different clients, choose the same."""
        self.wait()
        for client in ids.tolist():
            self._reserved[client] = self._new_record()

    def adopt(self, staged: bool) -> None:
        """The exchange is done: where rows were staged, by whichever process, those of all clients have
        the records that were reserved; otherwise these are free again."""
        records, self._reserved = self._reserved, {}
        if staged:
            self.staged |= records
        else:
            self._release(set(records.values()))

    def present(self, ids: Tensor) -> Tensor:
        return torch.tensor(
            [
                client in self.staged or client in self.pending or client in self.place
                for client in ids.tolist()
            ],
            dtype=torch.bool,
        )

    def _record_of(self, client: int) -> int:
        """Where the client's newest row is."""
        if client in self.staged:
            return self.staged[client]
        return self.pending[client] if client in self.pending else self.place[client]

    def room(self, rows: int, pinned: bool = False) -> State:
        """Empty tensors for so many rows; from page-locked memory a GPU takes them without a copy."""

        def empty(column: _Column) -> Tensor:
            small = rows * (column.stop - column.start) <= PINNED
            return torch.empty(rows, *column.shape, dtype=column.dtype, pin_memory=pinned and small)

        return {name: empty(column) for name, column in self._known().items()}

    def read(self, ids: Tensor, into: Mapping[str, Tensor] | None = None) -> State:
        """Read the rows of these clients (all must be present), stacked in the order given, into tensors that
        `room` made, or parts of them."""
        records = [self._record_of(client) for client in ids.tolist()]
        if not records:
            return {}
        out = dict(self.room(len(records)) if into is None else into)
        columns = self._known()
        wanted = {name: (c.dtype, (len(records), *c.shape)) for name, c in columns.items()}
        if {name: (value.dtype, tuple(value.shape)) for name, value in out.items()} != wanted:
            raise RunError(
                f"{self.path}: private rows have other fields or shapes than those they are read with:"
                f" {sorted(columns)}"
            )
        size = max(column.stop for column in columns.values())
        bytes_of = [
            out[name].view(len(records), -1).view(torch.uint8).numpy()
            for name, c in columns.items()
            if c.stop > c.start
        ]
        for i, record in enumerate(records):
            if record in self.unwritten:
                copy, row = self.unwritten[record]
                for name, value in copy.wait().items():
                    out[name][i] = value[row]
        if all(record in self.unwritten for record in records):
            return out
        try:
            with open(self.file, "rb", buffering=0) as file:
                for i, record in enumerate(
                    records
                ):  # straight to where it belongs: no copy, and nothing of the file stays mapped
                    if record not in self.unwritten:
                        _fill([memoryview(part[i]) for part in bytes_of], file.fileno(), record * size)
        except OSError as error:
            raise RunError(f"{self.file}: private rows cannot be read ({error})") from None
        return out

    def stage(
        self, ids: Tensor, state: Mapping[str, Tensor], wanted: Mapping[int, int] | None = None
    ) -> None:
        """Write new rows; they are read from now on and become permanent with the next commit. `wanted` are
        records that clients get if no other row has them: rows of another machine keep their places."""
        if not state or not len(ids):
            return
        rows = {name: value.detach().cpu() for name, value in state.items()}
        records, written = self._claim(ids, rows, wanted or {}), bytes_of(rows)
        self._write({record: (written, row) for row, record in enumerate(records)})

    def stage_copy(self, ids: Tensor, copy: HostCopy, first: int) -> None:
        """The same for rows of a copy, from the row `first` on: they are written with the commit."""
        if not copy.tensors or not len(ids):
            return
        records = self._claim(ids, copy.tensors)
        self.unwritten |= {record: (copy, row) for row, record in enumerate(records, first)}

    def write(self) -> None:
        """Write what the file does not have yet."""
        if self.unwritten:
            copies = {id(copy): copy for copy, _ in self.unwritten.values()}
            written = {key: bytes_of(copy.wait()) for key, copy in copies.items()}
            self._write({record: (written[id(copy)], row) for record, (copy, row) in self.unwritten.items()})

    def wait_for_copies(self) -> None:
        for copy in {id(copy): copy for copy, _ in self.unwritten.values()}.values():
            copy.wait()

    def wait(self) -> None:
        """Wait for the commit that is on its way: new rows may take the records that it sets free."""
        if self.on_its_way is not None:
            self.on_its_way.result()
            self.settle()

    def _claim(
        self, ids: Tensor, rows: Mapping[str, Tensor], wanted: Mapping[int, int] | None = None
    ) -> list[int]:
        """A record for the new row of each client."""
        self.wait()
        self._settled({name: (value.dtype, tuple(value.shape[1:])) for name, value in rows.items()})
        if wanted:
            self._reserve({client: wanted[client] for client in ids.tolist() if client in wanted})
        records = [self._record(client) for client in ids.tolist()]
        for record in records:
            self._forget(record)
        return records

    def _write(self, rows: Mapping[int, tuple[Mapping[str, np.ndarray], int]]) -> None:
        """Write these records: each is a row of some `bytes_of`."""
        columns = self._known()
        size = max(column.stop for column in columns.values())
        with plain_disk_errors(self.file), open(self.file, "r+b") as file:
            for record, (written, row) in rows.items():
                for name, column in columns.items():
                    file.seek(record * size + column.start)
                    file.write(written[name][row].data)

    def slot(self, client: int) -> int | None:
        """Where an engine has the client's newest row on its device, if it has."""
        return self._slots.get(self._record_of(client))

    def keep_slot(self, client: int, slot: int, free: list[int]) -> None:
        """Remember where the client's staged row is on the device; the slot goes to `free` with its
        record."""
        self._slots[self.staged[client]], self._free_slots = slot, free

    def index(self) -> Tensor:
        """What to commit, int64[clients, 2]: client, record."""
        merged = self.place | self.pending | self.staged
        index = np.empty((len(merged), 2), dtype=np.int64)
        index[:, 0], index[:, 1] = list(merged.keys()), list(merged.values())
        return torch.from_numpy(index[index[:, 0].argsort()])

    def hand_over(self, commit: Future[None]) -> None:
        """The staged rows are on their way to be committed, by a thread whose end `commit` tells."""
        self._release(set(self._kept.values()) - set(self.staged.values()))
        self.pending, self.staged, self._kept, self.on_its_way = self.staged, {}, {}, commit

    def settle(self) -> None:
        """The commit is done: pending rows, without another thread the staged ones, are the committed ones,
        and what they replace is free."""
        if self.on_its_way is None:
            self.pending, self.staged = self.staged, {}
            self._release(set(self._kept.values()) - set(self.pending.values()))
            self._kept = {}
        free = {self.place[client] for client in self.pending.keys() & self.place.keys()}
        self.place |= self.pending
        self.pending, self.on_its_way = {}, None
        self.unwritten.clear()
        self._release(free)

    def _release(self, records: set[int]) -> None:
        for record in records:
            self._forget(record)
            heapq.heappush(self._free, record)

    def _forget(self, record: int) -> None:
        """What was kept of a record outside the file is of no use."""
        self.unwritten.pop(record, None)
        if record in self._slots:
            self._free_slots.append(self._slots.pop(record))

    def _reserve(self, wanted: Mapping[int, int]) -> None:
        """Stage these clients at these records, as far as these are free."""
        used = {*self.place.values(), *self.pending.values(), *self.staged.values(), *self._kept.values()}
        for client, record in wanted.items():
            if client not in self.staged and record not in used:
                self.staged[client] = record
                used.add(record)
        self._end = max(self._end, max(used, default=-1) + 1)
        self._free = sorted(set(range(self._end)) - used)

    def _record(self, client: int) -> int:
        """The record for a client's new row: never a committed one, nor one that `restore` may need."""
        if client in self._reserved:
            self.staged[client] = self._reserved.pop(client)
        elif client not in self.staged or self.staged[client] == self._kept.get(client):
            self.staged[client] = self._new_record()
        return self.staged[client]

    def _new_record(self) -> int:
        """The lowest record that is free."""
        if not self._free:
            self._free.append(self._end)
            self._end += 1
        return heapq.heappop(self._free)

    def _known(self) -> dict[str, _Column]:
        """The columns of a record, read from the disk if need be."""
        if not self._columns:
            written = read_json(self.path / "fields.json")
            try:
                fields = {
                    n: (getattr(torch, f["dtype"]), tuple(f["shape"]))
                    for n, f in (written or {})["fields"].items()
                }
                sound = all(
                    isinstance(dtype, torch.dtype) and all(map(is_whole, shape))
                    for dtype, shape in fields.values()
                )
                columns = _lay_out(fields) if sound else {}
                sound = (
                    bool(columns)
                    and max(column.stop for column in columns.values()) <= self.file.stat().st_size
                )
            except (AttributeError, KeyError, TypeError, OSError):
                sound = False
            if sound:
                self._columns = columns
            else:
                raise RunError(
                    f"{self.path / 'fields.json'} is missing or damaged: private rows cannot be read"
                )
        return self._columns

    def _settled(self, fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, _Column]:
        """The columns of rows to be written; the first rows of a run decide them, and they are written to
        disk."""
        if not self.place and not self.staged:  # and nothing is pending
            self._columns = _lay_out(fields)
            with plain_disk_errors(self.file):
                self.file.touch()  # now, so that the folder is synced with it
            written = {
                n: {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
                for n, (dtype, shape) in fields.items()
            }
            write_json(self.path / "fields.json", {"fields": written})
        if self._known() != _lay_out(fields):
            raise RunError(
                f"{self.path}: a client's private state has other fields or shapes than the rows before it:"
                f" {sorted(fields)}"
            )
        return self._columns


def bytes_of(rows: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The bytes of each row."""
    return {
        name: value.reshape(len(value), -1).contiguous().view(torch.uint8).numpy()
        for name, value in rows.items()
    }


def _fill(buffers: list[memoryview], handle: int, place: int) -> None:
    """Fill these buffers, one after the other: the system reads at most 2 GB and 1,024 pieces at a time, and
    may read less."""
    while buffers:
        got = os.preadv(handle, buffers[:1024], place)
        if not got:
            raise OSError("it is shorter than its index says")
        place += got
        while buffers and got >= len(buffers[0]):
            got -= len(buffers.pop(0))
        if got:
            buffers[0] = buffers[0][got:]


def _lay_out(fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, _Column]:
    """Fields end to end, by name."""
    out, start = {}, 0
    for name, (dtype, shape) in sorted(fields.items()):
        stop = start + math.prod(shape) * dtype.itemsize
        out[name] = _Column(dtype, shape, start, stop)
        start = stop
    return out
