"""A network cut across its layers: some output channels of every layer on one side, the rest on the other."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.models.network import Network


def channels(network: Network, share: float) -> Tensor:
    """bool[size]: the first `share` of every layer's output channels; a single number, as a counter is, goes with them."""
    out = torch.zeros(network.layout.size, dtype=torch.bool)
    for slot in network.layout.slots:
        each = (slot.stop - slot.start) // (slot.shape[0] if slot.shape else 1)
        out[slot.start : slot.start + each * (round(share * slot.shape[0]) if slot.shape else 1)] = True
    return out
