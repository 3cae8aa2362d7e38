"""A network with further tensors beside its own, so that the one training loop can train these: a trigger,
say, by steps through the network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from holdfast.models.network import Network
from holdfast.models.proxy_module import ProxyModule

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class Widened(ProxyModule):
    """`net` is the network; the tensors are parameters of this module, and come before the network's in its
    vector."""

    proxied = "net"

    def __init__(self, module: nn.Module, shapes: Shapes):
        super().__init__()
        for name, shape in shapes:
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.net = module

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def widened(network: Network, tensors: Mapping[str, tuple[int, ...]]) -> Network:
    """The network with tensors of these names and shapes in front of its own; the same object every time."""
    shapes: Shapes = tuple((name, tuple(shape)) for name, shape in tensors.items())
    if shapes not in network.wider:
        network.wider[shapes] = Network(
            lambda: Widened(network.fresh(), shapes),
            network.head_name and f"net.{network.head_name}",
            f"{network.signature} with {shapes}",
            network.dtype,
        )
    wide = network.wider[shapes]
    wide.draws |= network.draws
    return wide
