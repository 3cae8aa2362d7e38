"""Exchanges and replies for tests of the wire format."""

from __future__ import annotations

import io

import numpy as np
import torch
from flwr.app import Array, ConfigRecord, RecordDict

from holdfast.core.types import Exchange, Field
from holdfast.deploy import wire

HEADER = wire.Header(
    run="run-1", task="train", round=3, step=1, discard_state=False, committed=2, threads=1, world="abc"
)


SCHEMA = {
    "update": Field("update", (4,)),
    "buffers": Field("buffer", (0,)),
    "count": Field("count"),
    "loss": Field("score", dtype=torch.float64),
}


BANK = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7


def exchange(pick: list[list[int]]) -> Exchange:
    n = len(pick)
    extra = {
        "selected": torch.arange(n) % 2 == 0,
        "weights": torch.rand(n, 2, 2, dtype=torch.float64),
        "counts": torch.arange(n),
    }
    return Exchange("train", torch.arange(n) * 5, BANK, torch.tensor(pick).reshape(n, -1), extra, step=1)


def sent(content: RecordDict) -> RecordDict:
    content["post"] = ConfigRecord({"nonce": "n"})
    return content


FIELDS = {
    "update": torch.tensor([[1.5, -0.0, 3e-45, 7.1]]),
    "buffers": torch.zeros(1, 0),
    "count": torch.tensor([12.0]),
    "loss": torch.tensor([float("inf")], dtype=torch.float64),
}


def npy(value: np.ndarray, fortran: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asfortranarray(value) if fortran else value, allow_pickle=True)
    return file.getvalue()


def raw(data: bytes) -> Array:
    """What a liar sends: the metadata say that all is well."""
    return Array(dtype="float32", shape=(4,), stype="numpy.ndarray", data=data)


GOOD = npy(np.zeros(4, dtype=np.float32))


def header(*shape: int) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue()


def told(header: str) -> bytes:
    """An array whose header says whatever a sender likes: numpy's parser fails on it in ways of its own."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + b"\0" * 16
