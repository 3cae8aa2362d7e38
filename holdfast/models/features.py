"""What a network makes of its samples before the head sees them.

The head is any named submodule, so the features are whatever it is called with; a hook catches that. Nothing here knows how a module is
built, and it works where a loss does: under `functional_call`, `vmap` and tracing."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.func import functional_call

from holdfast.core.errors import ConfigError


def features_and_logits(net: nn.Module, x: Tensor, head: str, tensors: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The input of the head, [samples, d], and its output; for a Split network, backbone(x) and net(x). `tensors` may stand in for the
    module's own, for example those of the client's last model."""
    caught: list[Tensor] = []
    handle = net.get_submodule(head).register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    try:
        logits = net(x) if tensors is None else functional_call(net, dict(tensors), (x,))
    finally:
        handle.remove()
    if not caught:
        raise ConfigError(f"model: the forward pass never calls the head '{head}'; call it as a module, self.{head}(features)")
    return caught[0].flatten(1), logits


def features(net: nn.Module, x: Tensor, head: str, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
    """[samples, d]: what the head is given."""
    return features_and_logits(net, x, head, tensors)[0]


def embedding(net: nn.Module, x: Tensor, head: str | None, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
    """The features or, where no head tells them from the rest, the network's whole answer."""
    if head is not None:
        return features(net, x, head, tensors)
    answer: Tensor = net(x) if tensors is None else functional_call(net, dict(tensors), (x,))
    return answer.flatten(1)
