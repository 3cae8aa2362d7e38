"""A method's own module in the place of a model's head, with the head inside it: it sees what the head is
given and says what it likes."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout
from holdfast.models.features import NO_HEAD, head_sizes
from holdfast.models.proxy_module import ProxyModule


class ReplacedHead(ProxyModule):
    """A head with something around it."""

    proxied = "inner"

    def __init__(self, head: nn.Module):
        super().__init__()
        self.inner = head


def replace_head(
    module: nn.Module, head: str | None, make: Callable[[nn.Module, int, int], ReplacedHead]
) -> nn.Module:
    """The module with make(head, classes, features) where its head was; all other names stay as they were."""
    if not head:
        raise ConfigError(NO_HEAD)
    parent, _, name = head.rpartition(".")
    setattr(
        module.get_submodule(parent),
        name,
        make(module.get_submodule(head), *head_sizes(Layout.of(module, head))),
    )
    return module
