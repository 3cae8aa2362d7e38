"""The messages between the server and one client, as Flower records. Flower does not check them: names,
sizes, shapes and values are the sender's claims. So everything is checked here before it is used, nothing is
unpickled, and memory is taken only after the length was checked.

    request   header: what is asked, and when          bank: this client's models [m, size]          extra:
              its row of further tensors
    reply     fields: an array for each large field of the task's schema          small: all other fields

The small fields travel together, as hexadecimal digits: every object of a message costs the SuperLink several
statements in its database, and an array takes two objects, whether it has one number or a million.
The record `post` is the envelope (envelope.py)."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from torch import Tensor

from holdfast.core.errors import in_print
from holdfast.core.types import Exchange, Schema
from holdfast.deploy.envelope import ENVELOPE
from holdfast.deploy.messaging import config_record, expect_names
from holdfast.deploy.replies import Malformed, ReplyLimits

_HEADER_ROOM = 1024  # an .npy header of a plain array takes 128 bytes
_ENVELOPE_ROOM = 1 << 16
_CHUNK = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
_SMALL_FIELD, _SMALL_FIELDS = 256, 64  # bytes of a small field, and how many there may be in a reply
_ROUNDS, _THREADS = 10**9, 4096  # a node names files by round and step, and starts so many threads
_LABEL = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9_.=-]{0,99}")
_DTYPES = {
    np.dtype("<f4"): torch.float32,
    np.dtype("<f8"): torch.float64,
    np.dtype("<i8"): torch.int64,
    np.dtype("?"): torch.bool,
}


@dataclass(frozen=True)
class Header:
    """What a client is asked, and the state of the run. `run` names the run over restarts of the server;
    `world` is a digest of what both sides must agree on; `committed` is the round that can no longer be
    replayed."""

    run: str
    task: str
    round: int
    step: int
    discard_state: bool
    committed: int
    threads: int
    world: str

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.run):  # it names a folder on the client
            raise Malformed(f"run label {self.run[:100]!r} is not a plain name")
        if not self.task.isidentifier() or len(self.task) > 100 or len(self.world) > 100:
            raise Malformed(
                f"task {self.task[:100]!r} is not a name, or world {self.world[:100]!r} is not a digest"
            )
        if not (
            0 <= self.step < _ROUNDS
            and 1 <= self.threads <= _THREADS
            and 0 <= self.committed < self.round <= _ROUNDS
        ):
            raise Malformed(
                f"round {self.round}, step {self.step}, committed {self.committed}, threads {self.threads}"
                " are not possible"
            )


def pack_exchange(exchange: Exchange, place: int, header: Header) -> RecordDict:
    """Return what the client at this place of the exchange receives: its own models, each once, and its own
    row of the extra tensors."""
    wanted, pick = torch.unique(exchange.pick[place], return_inverse=True)
    none = int((wanted < 0).sum())  # -1, where no model is sent, sorts first and so stays -1
    bank = exchange.bank[wanted[none:]]
    return RecordDict(
        {
            "header": ConfigRecord({**asdict(header), "pick": (pick - none).tolist()}),
            "bank": ArrayRecord({"bank": _array(bank)} if len(bank) else {}),
            "extra": ArrayRecord(
                {name: _array(value[place : place + 1]) for name, value in exchange.extra.items()}
            ),
        }
    )


def read_header(content: RecordDict) -> Header:
    expect_names("records", set(content), {"header", "bank", "extra", ENVELOPE})
    record = config_record(content, "header")
    expect_names("header", set(record), {f.name for f in fields(Header)} | {"pick"})
    values = {f.name: record[f.name] for f in fields(Header)}
    for f in fields(Header):
        if type(values[f.name]).__name__ != f.type:
            raise Malformed(f"header.{f.name} is a {type(values[f.name]).__name__}, expected {f.type}")
    return Header(**values)  # type: ignore[arg-type]


def read_exchange(
    content: RecordDict, header: Header, client: int, size: int, dtype: torch.dtype
) -> Exchange:
    """Read the request to one client, whose models have `size` numbers."""
    pick = _places(config_record(content, "header")["pick"])
    models = max(pick, default=-1) + 1
    sent = _arrays(content, "bank")
    expect_names("bank", set(sent), {"bank"} if models else set())
    # A client that is sent no model still needs a bank to point into; its values are never used.
    bank = (
        _tensor("bank", sent["bank"], (models, size), dtype)
        if models
        else torch.zeros(min(1, len(pick)), size, dtype=dtype)
    )
    # It would spoil the private models that are pulled to it, permanently.
    if not bool(torch.isfinite(bank).all()):
        raise Malformed("the model sent is not finite")
    extra = {
        name: _tensor(f"extra.{in_print(name[:40])}", array)
        for name, array in _arrays(content, "extra").items()
    }
    if any(value.ndim == 0 or value.shape[0] != 1 for value in extra.values()):
        raise Malformed("extra: every tensor must have the one row of this client")
    picks = torch.tensor(pick, dtype=torch.int64).reshape(1, -1)
    return Exchange(
        header.task, torch.tensor([client]), bank, picks, extra, header.step, header.discard_state
    )


def _places(pick: object) -> list[int]:
    """Read a list of places; -1 means no model."""
    places = [p for p in pick if type(p) is int and p >= -1] if isinstance(pick, list) else None
    if places is None or places != pick:
        raise Malformed("header.pick is not a list of places")
    return places


def pack_fields(sent: Mapping[str, Tensor]) -> RecordDict:
    """Return a client's reply; every tensor has one row."""
    small = [name for name, value in sent.items() if value[0].nbytes <= _SMALL_FIELD][:_SMALL_FIELDS]
    digits: dict[str, Any] = {name: _bytes_of(sent[name][0]).hex() for name in small}
    arrays = {name: _array(value[0]) for name, value in sent.items() if name not in digits}
    return RecordDict({"fields": ArrayRecord(arrays), "small": ConfigRecord(digits)})


def read_fields(content: RecordDict, schema: Schema, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return one client's reply as tensors with one row. Names, sizes, dtypes and shapes are checked; values
    are checked by the screen."""
    expect_names("records", set(content), {"fields", "small", ENVELOPE})
    sent, small = _arrays(content, "fields"), config_record(content, "small")
    expect_names("fields", set(sent) | set(small), set(schema))
    if both := set(sent) & set(small):
        raise Malformed(f"{min(both)} is there twice")
    return {
        name: (
            _tensor(name, sent[name], field.shape, field.dtype or dtype)
            if name in sent
            else _small_tensor(name, small[name], field.shape, field.dtype or dtype)
        )[None]
        for name, field in schema.items()
    }


def limits_of(schema: Schema, dtype: torch.dtype) -> ReplyLimits:
    """Return the limits of an honest reply to a task: message, records, envelope and table of fields, and for
    each field an array of chunks. A few more objects are read, so a mistake can be named."""
    sizes = [_bytes(field.shape, field.dtype or dtype) + _HEADER_ROOM for field in schema.values()]
    objects = sum(2 + size // _CHUNK for size in sizes)
    return ReplyLimits(20 + objects, _ENVELOPE_ROOM + sum(sizes) + _HEADER_ROOM * objects)


def _array(value: Tensor) -> Array:
    return Array(np.ascontiguousarray(value.detach().cpu().numpy()).reshape(tuple(value.shape)))


def _bytes_of(value: Tensor) -> bytes:
    return np.ascontiguousarray(value.detach().cpu().numpy()).tobytes()


def _small_tensor(name: str, digits: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Decode a small field, whose form is known."""
    size = _bytes(shape, dtype)
    if not isinstance(digits, str) or len(digits) != 2 * size or size > _SMALL_FIELD:
        raise Malformed(f"{name} is not the {2 * size} digits of a small field")
    try:
        data = bytes.fromhex(digits)
    except ValueError:
        data = b""
    if len(data) != size:  # spaces are skipped between digits
        raise Malformed(f"{name} is not the {2 * size} digits of a small field")
    truth = dtype == torch.bool  # of which any byte but 0 and 1 would be added up as it is
    kind: Any = np.uint8 if truth else next(kind for kind, known in _DTYPES.items() if known == dtype)
    values = torch.from_numpy(np.frombuffer(data, dtype=kind).reshape(shape).copy())
    return values != 0 if truth else values


def _tensor(
    name: str, array: Array, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Decode an array. `array.shape` and `array.dtype` are claims and are not used. Where the shape is known
    beforehand, nothing longer is parsed."""
    data = array.data
    if shape is not None and dtype is not None and len(data) > _bytes(shape, dtype) + _HEADER_ROOM:
        raise Malformed(f"{name} has {len(data)} bytes, expected about {_bytes(shape, dtype)}")
    file = io.BytesIO(data[:_HEADER_ROOM])
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("another version of the format")
        real, fortran, kind = np.lib.format.read_array_header_1_0(file, max_header_size=_HEADER_ROOM)
    # numpy's parser fails in many ways on hostile input; that is a fault of the sender only
    except Exception as error:
        raise Malformed(
            f"{name} is not a readable array ({type(error).__name__}: {in_print(str(error)[:80])})"
        ) from None
    if kind not in _DTYPES or (dtype is not None and _DTYPES[kind] != dtype):
        raise Malformed(
            f"{name} is of {in_print(str(kind)[:80])}" + (f", expected {dtype}" if dtype is not None else "")
        )
    if (shape is not None and real != shape) or (fortran and len(real) > 1) or not _is_shape(real):
        raise Malformed(f"{name} has shape {str(real)[:100]}, expected {shape}")
    if len(data) - file.tell() != _bytes(real, _DTYPES[kind]):
        needed = f"its shape {str(real)[:100]} needs {_bytes(real, _DTYPES[kind])}"
        raise Malformed(f"{name} has {len(data) - file.tell()} bytes of values, {needed}")
    truth = _DTYPES[kind] == torch.bool  # of which any byte but 0 and 1 would be added up as it is
    values = torch.from_numpy(
        np.frombuffer(data, dtype=np.uint8 if truth else kind, offset=file.tell()).reshape(real).copy()
    )
    return values != 0 if truth else values


def _is_shape(sizes: tuple[int, ...]) -> bool:
    """Return whether NumPy and torch can have this shape; an array without values may claim any other."""
    return (
        len(sizes) <= 32
        and all(type(size) is int and 0 <= size < 2**48 for size in sizes)
        and math.prod(s or 1 for s in sizes) < 2**63
    )


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _arrays(content: RecordDict, name: str) -> ArrayRecord:
    record = content.get(name)
    if not isinstance(record, ArrayRecord):
        raise Malformed(f"record '{name}' is not a table of arrays")
    return record
