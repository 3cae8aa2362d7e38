"""The fields of a client's reply, as its sender may change them."""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import RecordDict

from holdfast.deploy import wire


def field(content: RecordDict, name: str, kind: str = "<f4") -> torch.Tensor:
    """A number of the small fields, or an array of the others."""
    small = content["small"]
    if name in small:
        return torch.from_numpy(np.frombuffer(bytes.fromhex(str(small[name])), kind).reshape(()).copy())
    return torch.from_numpy(content["fields"][name].numpy().copy())


def put(content: RecordDict, name: str, value: torch.Tensor) -> None:
    """As an array, which a small field may be too."""
    content["small"].pop(name, None)
    content["fields"][name] = wire._array(value)
