"""Replace a model's head by a method's own module, which contains the head, receives the head's input and
decides the output."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout
from holdfast.models.features import NO_HEAD, head_sizes
from holdfast.models.proxy_module import ProxyModule


class ReplacedHead(ProxyModule):
    """A module that replaces the head and contains it as `inner`."""

    proxied = "inner"

    def __init__(self, head: nn.Module):
        super().__init__()
        self.inner = head


def replace_head(
    module: nn.Module, head: str | None, make: Callable[[nn.Module, int, int], ReplacedHead]
) -> nn.Module:
    """Replace the head of the module by make(head, classes, features); all other names stay as they were."""
    if not head:
        raise ConfigError(NO_HEAD)
    parent, _, name = head.rpartition(".")
    setattr(
        module.get_submodule(parent),
        name,
        make(module.get_submodule(head), *head_sizes(Layout.of(module, head))),
    )
    return module
