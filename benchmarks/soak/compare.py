"""Whether two runs are the same, bit by bit, and what a folder holds that it should not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.core.types import State
from holdfast.storage.client_state import RowStore
from holdfast.storage.store import Store, read_tensors


def content(run: Path, private: bool = True) -> dict[str, Any]:
    """All that a finished run says and holds, less its seconds: metrics, arrays, the server's state and,
    unless told, private rows."""
    store = Store(run)
    head, result = store.head(), store.result()
    if head is None or result is None:
        raise ValueError(f"{run} is not finished")
    last, state = head
    out: dict[str, Any] = {
        f"state/{name}": _bits(value) for name, value in state.items() if name != "rows/index"
    }
    if private:
        out |= {
            f"client {client}/{name}": _bits(value)
            for client, row in private_rows(run).items()
            for name, value in row.items()
        }
    for round in range(last + 1):
        out |= {f"round {round}/{name}": _bits(value) for name, value in store.arrays(round).items()}
    for part in store.parts(last):
        out |= {f"round {part['round']}/{name}": value for name, value in part.items() if name != "seconds"}
    out |= {
        f"final/{name}": value for name, value in result["final"].items() if not name.startswith("seconds/")
    }
    return out | {"rounds": last, "parts": len(store.parts(last))}


def private_rows(run: Path) -> dict[int, State]:
    """What the simulator keeps for each client."""
    head = Store(run).head()
    assert head is not None
    rows = RowStore(run / "rows", head[1]["rows/index"])
    return {client: rows.read(torch.tensor([client])) for client in sorted(rows.place)}


def node_rows(node: Path, last: int) -> State:
    """What a node keeps for its client: its newest state up to the last round."""
    files = sorted(node.glob("state/*/*/[0-9]*-*.safetensors"), key=lambda file: file.name)
    kept = [file for file in files if int(file.stem.partition("-")[0]) <= last]
    return read_tensors(kept[-1]) if kept else {}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]


def same_bits(one: State, other: State) -> bool:
    return {name: _bits(value) for name, value in one.items()} == {
        name: _bits(value) for name, value in other.items()
    }


def names(folder: Path) -> set[str]:
    """Of all files below a folder."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}


def _bits(value: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
