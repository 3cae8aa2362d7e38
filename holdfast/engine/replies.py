"""Room for what the clients of a group of calls send, and where each field of it lies.

Updates, models and buffers stay on the device on which the servers compute: one tensor for the whole group,
of which every call has its own rows, so that nothing is copied where one stack trained all. All other fields,
one number or a few for each client, are on the host, where decisions are made."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from holdfast.core.device import on_host, to_device
from holdfast.core.files import plain_disk_errors
from holdfast.core.types import Schema
from holdfast.engine.run_context import Call

LARGE = frozenset({"update", "model", "buffer"})
"""Kinds of fields that stay on the device."""


class Replies:
    """What the clients of some calls send, chunk by chunk, in the order of the calls."""

    def __init__(self, calls: list[Call], schema: Schema, home: torch.device, bound: int | None):
        self.calls, self.schema, self.home, self.bound = calls, schema, home, bound
        self.ends = list(accumulate(len(call.exchange.to) for call in calls))
        self._own: list[dict[str, Tensor]] = [{} for _ in calls]
        self._whole: dict[str, Tensor] = {}
        """Fields on the device: the rows of all calls, one call after the other."""
        self._there = 0
        """How many rows of these are there."""

    def take(self, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keep what the next chunk sends, as far as it stays on the device. Returns the other fields, on the
        host."""
        staying = [name for name in sent if self._stays(name)]
        start = self._there
        for name in staying:
            value = to_device(sent[name].detach(), self.home)
            if not start and len(value) == self.ends[-1]:
                self._whole[name] = self._of_its_own(value)
                continue
            if name not in self._whole:
                self._whole[name] = value.new_empty(self.ends[-1], *value.shape[1:])
            self._whole[name][start : start + len(value)] = value
        self._there += len(next(iter(sent.values()), ()))
        return on_host({name: value for name, value in sent.items() if name not in staying})

    def put(self, name: str, place: int, clients: slice, rows: Tensor) -> None:
        """Keep a field of some clients of the call at this place."""
        own = self._own[place]
        if name not in own:
            own[name] = self._empty(self.calls[place], rows)
        own[name][clients] = rows

    def of(self, place: int) -> dict[str, Tensor]:
        """What the clients of the call at this place sent."""
        end = self.ends[place]
        rows = slice(end - len(self.calls[place].exchange.to), end)
        return {**self._own[place], **{name: value[rows] for name, value in self._whole.items()}}

    def _of_its_own(self, value: Tensor) -> Tensor:
        """The field in memory that attackers may write to: rows of its own, and not those of the models that
        the clients were sent, which a client that changes nothing may hand back."""
        value = value.contiguous()  # a part of whole models, say, would keep all of them
        sent = {call.exchange.bank.untyped_storage()._cdata for call in self.calls}
        return value.clone() if value.untyped_storage()._cdata in sent else value

    def _stays(self, name: str) -> bool:
        return self.home.type != "cpu" and name in self.schema and self.schema[name].kind in LARGE

    def _empty(self, call: Call, like: Tensor) -> Tensor:
        """Room for one field of a whole cohort: memory, or, where that would exceed the bound, a file without
        a name, which the system may keep on disk and which is removed with the tensor."""
        run_context, shape = call.run_context, (len(call.exchange.to), *like.shape[1:])
        size = math.prod(shape) * like.element_size()
        if self.bound is None or size <= self.bound:
            return torch.empty(shape, dtype=like.dtype)
        folder = run_context.rows.path
        with (
            plain_disk_errors(folder),
            tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=".writing") as file,
        ):
            # a full disk is an error here; later it would be a signal
            os.posix_fallocate(file.fileno(), 0, size)
            whole = torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=like.dtype)
            return whole.view(shape)
