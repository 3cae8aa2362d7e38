"""Catch the features that a network computes before its head.

The head is any named submodule, and the features are its input; a hook catches them. The code does not depend
on how a module is built, and works where a loss does: under `functional_call`, `vmap` and tracing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.func import functional_call

from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout, Slot

NO_HEAD = "model: this method needs a head; name the submodule, as in holdfast.Model(module, head='fc')"


@contextmanager
def catching(net: nn.Module, head: str | None) -> Iterator[list[Tensor]]:
    """Within this context every forward pass adds its features [samples, d] to the list: the input of the
    head or, without a head, the network's whole output."""
    caught: list[Tensor] = []
    if head is None:
        handle = net.register_forward_hook(lambda module, inputs, answer: caught.append(answer.flatten(1)))
    else:
        handle = net.get_submodule(head).register_forward_pre_hook(
            lambda module, inputs: caught.append(inputs[0].flatten(1))
        )
    try:
        yield caught
    finally:
        handle.remove()
    if not caught:
        raise ConfigError(
            f"model: the forward pass never calls the head '{head}' as a module; call it as in"
            f" self.{head}(features)"
        )


def features_and_logits(
    net: nn.Module, x: Tensor, head: str | None, tensors: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the features [samples, d] and the output of one pass; for a BackboneHead network, backbone(x)
    and net(x). `tensors` may replace the module's own, for example by those of the client's last model."""
    with catching(net, head) as caught:
        logits = net(x) if tensors is None else functional_call(net, dict(tensors), (x,))
    return caught[0], logits


def features(
    net: nn.Module, x: Tensor, head: str | None, tensors: Mapping[str, Tensor] | None = None
) -> Tensor:
    return features_and_logits(net, x, head, tensors)[0]


def head_sizes(layout: Layout) -> tuple[int, int]:
    """Return the number of classes and the number of features of the head: the output of its last matrix and
    the input of its first."""
    matrices = [slot for slot in _head(layout) if len(slot.shape) == 2]
    if not matrices:
        raise ConfigError(
            f"model: the head '{layout.head}' has no linear layer, so its number of features is unknown;"
            " name another head"
        )
    return matrices[-1].shape[0], matrices[0].shape[1]


def linear_head(layout: Layout) -> tuple[Slot, Slot | None]:
    """Return the matrix and the bias of a head that is one linear layer, for a server half, which has no
    module."""
    matrix, *bias = _head(layout) or (None,)
    if (
        matrix is None
        or len(matrix.shape) != 2
        or len(bias) > 1
        or any(slot.shape != matrix.shape[:1] for slot in bias)
    ):
        raise ConfigError(
            f"model: this method needs a head that is one linear layer, and '{layout.head}' is not;"
            " choose another model"
        )
    return matrix, bias[0] if bias else None


def _head(layout: Layout) -> list[Slot]:
    if not layout.head:
        raise ConfigError(NO_HEAD)
    return [slot for slot in layout.slots if not slot.buffer and slot.name.startswith(layout.head + ".")]
