"""What a network makes of its samples before the head sees them.

The head is any named submodule, so the features are whatever it is called with; a hook catches that. Nothing
here knows how a module is built, and it works where a loss does: under `functional_call`, `vmap` and
tracing."""

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
    """While it lasts, every forward pass adds its features [samples, d] to the list: what the head is given
    or, where no head tells them from the rest, the network's whole answer."""
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
            f"model: the forward pass never calls the head '{head}' as a module, as in self.{head}(features)"
        )


def features_and_logits(
    net: nn.Module, x: Tensor, head: str | None, tensors: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The features [samples, d] and the answer of one pass; for a Split network, backbone(x) and net(x).
    `tensors` may stand in for the module's own, for example those of the client's last model."""
    with catching(net, head) as caught:
        logits = net(x) if tensors is None else functional_call(net, dict(tensors), (x,))
    return caught[0], logits


def features(
    net: nn.Module, x: Tensor, head: str | None, tensors: Mapping[str, Tensor] | None = None
) -> Tensor:
    return features_and_logits(net, x, head, tensors)[0]


def head_sizes(layout: Layout) -> tuple[int, int]:
    """How many classes the head tells apart and how many features it is given: what its last matrix makes,
    and its first one takes."""
    matrices = [slot for slot in _head(layout) if len(slot.shape) == 2]
    if not matrices:
        raise ConfigError(
            f"model: the head '{layout.head}' has no linear layer, so nobody knows how many features it is"
            " given"
        )
    return matrices[-1].shape[0], matrices[0].shape[1]


def linear_head(layout: Layout) -> tuple[Slot, Slot | None]:
    """The matrix and the bias of a head that is one linear layer: for a server half, which has no module to
    ask."""
    matrix, *bias = _head(layout) or (None,)
    if (
        matrix is None
        or len(matrix.shape) != 2
        or len(bias) > 1
        or any(slot.shape != matrix.shape[:1] for slot in bias)
    ):
        raise ConfigError(
            f"model: this method needs a head that is one linear layer, and '{layout.head}' is none; choose"
            " another model"
        )
    return matrix, bias[0] if bias else None


def _head(layout: Layout) -> list[Slot]:
    if not layout.head:
        raise ConfigError(NO_HEAD)
    return [slot for slot in layout.slots if not slot.buffer and slot.name.startswith(layout.head + ".")]
