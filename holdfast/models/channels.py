"""Divide a network across its layers: some output channels of every layer on one side, the rest on the
other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holdfast.models.network import Network

_SECOND = (nn.Embedding, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Layers whose weights have their output channels on the second axis: the first axis of word vectors is the
words."""


def axis_of(network: Network, name: str) -> int:
    """Return the axis of a tensor along which its layer's output channels lie."""
    layer, _, kind = name.rpartition(".")
    return int(kind == "weight" and isinstance(network.module.get_submodule(layer), _SECOND))


def channels(network: Network, share: float) -> Tensor:
    """Return bool[size]: the first `share` of every layer's output channels; single numbers, such as
    counters, are included."""
    out = torch.zeros(network.layout.size, dtype=torch.bool)
    for slot in network.layout.slots:
        chosen = out[slot.start : slot.stop].view(slot.shape)
        if slot.shape:
            axis = axis_of(network, slot.name)
            chosen = chosen.narrow(axis, 0, round(share * slot.shape[axis]))
        chosen.fill_(True)
    return out
