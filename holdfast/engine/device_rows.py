"""Private rows on the device between rounds, so that the next round reads them without the disk.

What a stack of clients leaves is kept in slots of the device's memory, and is written to disk from copies in
the host's memory while the next round trains (storage/write_behind.py). Both have a bound. Rows that find no
slot are read from the disk; rows whose copies would be too large are written at once. Neither changes a
value."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from holdfast.core.device import on_host, to_device
from holdfast.core.memory import physical_memory
from holdfast.core.types import State
from holdfast.engine.host_threads import each
from holdfast.engine.run_context import Call
from holdfast.storage.client_state import RowStore
from holdfast.storage.host_copy import HostCopy
from holdfast.storage.write_behind import most_behind

_SHARE = 8
"""Slots may have this part of the device's memory."""
Staged = tuple[RowStore, Tensor, slice]
"""Rows of some clients of an experiment: where they are in their stack."""


@dataclass
class _Slots:
    """Rows of one layout: one slot each."""

    rows: State
    free: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(next(iter(self.rows.values())))

    @property
    def size(self) -> int:
        return sum(value.nbytes for value in self.rows.values())


class DeviceRows:
    """The slots of one engine, for all of its experiments."""

    def __init__(self, device: torch.device, bound: int | None = None):
        self.device = device
        self.bound = _memory(device) // _SHARE if bound is None else bound
        self._slots: dict[tuple[object, ...], _Slots] = {}
        self._copies: weakref.WeakSet[HostCopy] = weakref.WeakSet()

    def stage(self, pieces: Sequence[Staged], state: State) -> None:
        """Keep the rows that a stack leaves, and stage them to be written with the commit of their round."""
        if not state:
            return
        size = sum(value.nbytes for value in state.values())
        for rows, _, _ in pieces:
            rows.wait()  # the copies of the round before are forgotten then
        if size + sum(copy.size for copy in self._copies) <= most_behind():
            copy = HostCopy(state)
            self._copies.add(copy)
            each(lambda piece: piece[0].stage_copy(piece[1], copy, piece[2].start), pieces)
        else:
            host = on_host(state)

            def write(piece: Staged) -> None:
                piece[0].stage(piece[1], {name: value[piece[2]] for name, value in host.items()})

            each(write, pieces)
        self._keep(pieces, state)

    def _keep(self, pieces: Sequence[Staged], state: State) -> None:
        whose = [(rows, client) for rows, ids, _ in pieces for client in ids.tolist()]
        where = torch.cat([torch.arange(place.start, place.stop) for _, _, place in pieces])
        slots = self._of(state)
        taken = self._take(slots, len(whose))
        if not taken:
            return
        try:
            places, where = self._index(taken), to_device(where[: len(taken)], self.device)
            for name, value in state.items():
                slots.rows[name].index_copy_(0, places, value.detach().to(self.device)[where])
        except torch.OutOfMemoryError:
            slots.free += taken
            return
        for (rows, client), slot in zip(whose, taken, strict=False):
            rows.keep_slot(client, slot, slots.free)

    def read(self, calls: list[Call]) -> tuple[Tensor, State]:
        """Which of these clients have private rows, and those rows on the device."""
        known = [call.run_context.rows.present(call.exchange.to) for call in calls]
        asked = [
            (call.run_context.rows, call.exchange.to[there])
            for call, there in zip(calls, known, strict=True)
            if bool(there.any())
        ]
        return torch.cat(known), self._read(asked) if asked else {}

    def _read(self, asked: list[tuple[RowStore, Tensor]]) -> State:
        slots = [rows.slot(client) for rows, ids in asked for client in ids.tolist()]
        there = torch.tensor([slot is not None for slot in slots])
        kept = [slot for slot in slots if slot is not None]
        if not kept:
            return self._from_disk(asked)
        held = self._of(asked[0][0].room(0)).rows
        found = {name: value[self._index(kept)] for name, value in held.items()}
        if len(kept) == len(slots):
            return found
        ends = list(accumulate(len(ids) for _, ids in asked))
        missing = [
            (rows, ids[~there[end - len(ids) : end]]) for (rows, ids), end in zip(asked, ends, strict=True)
        ]
        others = self._from_disk([(rows, ids) for rows, ids in missing if len(ids)])
        order = torch.cat([there.nonzero().flatten(), (~there).nonzero().flatten()]).argsort()
        places = to_device(order, self.device)
        return {name: torch.cat([value, others[name]])[places] for name, value in found.items()}

    def _from_disk(self, asked: list[tuple[RowStore, Tensor]]) -> State:
        return {name: to_device(value, self.device) for name, value in read_rows(asked, self.device).items()}

    def _of(self, state: Mapping[str, Tensor]) -> _Slots:
        """The slots of rows with these fields."""
        layout = tuple((name, value.dtype, tuple(value.shape[1:])) for name, value in sorted(state.items()))
        if layout not in self._slots:
            none = {name: torch.empty(0, *shape, dtype=dtype) for name, dtype, shape in layout}
            self._slots[layout] = _Slots({name: value.to(self.device) for name, value in none.items()})
        return self._slots[layout]

    def _take(self, slots: _Slots, count: int) -> list[int]:
        """So many free slots, or as many as fit."""
        if len(slots.free) < count:
            self._grow(slots, count - len(slots.free))
        # the lowest first: slots that are used together lie together
        slots.free.sort(reverse=True)
        return [slots.free.pop() for _ in range(min(count, len(slots.free)))]

    def _grow(self, slots: _Slots, missing: int) -> None:
        """Make room for more rows, if it fits beside what there is: a round needs its own slots and those of
        the round before."""
        before = slots.count
        row = sum(value.shape[1:].numel() * value.itemsize for value in slots.rows.values())
        left = self.bound - sum(other.size for other in self._slots.values())
        count = min(2 * before + 2 * missing, left // max(row, 1))
        if count <= before:
            return
        try:
            grown = {name: value.new_empty(count, *value.shape[1:]) for name, value in slots.rows.items()}
        except torch.OutOfMemoryError:
            return
        for name, value in slots.rows.items():
            grown[name][:before] = value
        slots.rows = grown
        slots.free += range(before, count)

    def _index(self, slots: list[int]) -> Tensor:
        return to_device(torch.tensor(slots, dtype=torch.int64), self.device)


def read_rows(asked: list[tuple[RowStore, Tensor]], device: torch.device) -> State:
    """Private rows of clients of several experiments from the disk, end to end; for a GPU in page-locked
    memory."""
    ends = list(accumulate(len(ids) for _, ids in asked))
    whole = asked[0][0].room(ends[-1], pinned=device.type == "cuda") if asked else {}

    def read(piece: tuple[RowStore, Tensor, int]) -> None:
        rows, ids, end = piece
        rows.read(ids, {name: value[end - len(ids) : end] for name, value in whole.items()})

    each(read, [(rows, ids, end) for (rows, ids), end in zip(asked, ends, strict=True)])
    return whole


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return physical_memory()
