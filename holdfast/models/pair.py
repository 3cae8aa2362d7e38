"""A network beside a second one of the same shape, for methods that train a shared and a private model
together, step by step.

To all other code the pair looks like the first network: it predicts with it and sends only it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from holdfast.models.network import Network
from holdfast.models.proxy_module import ProxyModule

SHARED, OWN = "shared", "own"


class Pair(ProxyModule):
    """`shared` is the model as it was built, `own` starts as a copy of it."""

    proxied = SHARED

    def __init__(self, module: nn.Module):
        super().__init__()
        self.shared, self.own = module, copy.deepcopy(module)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x)


def halves(network: Network) -> tuple[Tensor, Tensor]:
    """Return the positions of the two models in the vector of a pair, each in the same order: parameters,
    then buffers."""
    return network.layout.under(SHARED).nonzero().flatten(), network.layout.under(OWN).nonzero().flatten()


def taken(vectors: Tensor, where: Tensor) -> Tensor:
    """Return the values [..., k] at these positions."""
    return vectors.index_select(-1, where.to(vectors.device))


def filled(vectors: Tensor, where: Tensor, values: Tensor) -> Tensor:
    """Return a copy of the vectors with other values at these positions."""
    return vectors.index_copy(-1, where.to(vectors.device), values)


def loss_with(
    net: nn.Module, parameters: Mapping[str, Tensor], loss: Callable[[Any, Any], Tensor], batch: Any
) -> Tensor:
    """Compute the loss of a module with other parameters than its own; its running statistics are its own."""
    return functional_call(
        _Lossy(net, loss), {f"net.{name}": value for name, value in parameters.items()}, (batch,)
    )


class _Lossy(nn.Module):
    """The loss as a module, so that parameters are swapped for everything it does with the network."""

    def __init__(self, net: nn.Module, loss: Callable[[Any, Any], Tensor]):
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.net, batch)
