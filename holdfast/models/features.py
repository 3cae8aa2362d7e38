"""What a network makes of its samples before the head sees them.

The head is any named submodule, so the features are whatever it is called with; a hook catches that. Nothing here knows how a module is
built, and it works where a loss does: under `functional_call`, `vmap` and tracing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.func import functional_call

from holdfast.core.errors import ConfigError


@contextmanager
def catching(net: nn.Module, head: str | None) -> Iterator[list[Tensor]]:
    """While it lasts, every forward pass adds its features [samples, d] to the list: what the head is given or, where no head tells them
    from the rest, the network's whole answer."""
    caught: list[Tensor] = []
    if head is None:
        handle = net.register_forward_hook(lambda module, inputs, answer: caught.append(answer.flatten(1)))
    else:
        handle = net.get_submodule(head).register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0].flatten(1)))
    try:
        yield caught
    finally:
        handle.remove()
    if not caught:
        raise ConfigError(f"model: the forward pass never calls the head '{head}' as a module, as in self.{head}(features)")


def features_and_logits(net: nn.Module, x: Tensor, head: str | None, tensors: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The features [samples, d] and the answer of one pass; for a Split network, backbone(x) and net(x). `tensors` may stand in for the
    module's own, for example those of the client's last model."""
    with catching(net, head) as caught:
        logits = net(x) if tensors is None else functional_call(net, dict(tensors), (x,))
    return caught[0], logits


def features(net: nn.Module, x: Tensor, head: str | None, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
    return features_and_logits(net, x, head, tensors)[0]
