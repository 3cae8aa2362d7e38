"""A module that wraps another one and gives access to its attributes."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn


class ProxyModule(nn.Module):
    """Looks up attributes that it does not have in the submodule that it wraps, so that a user's loss can
    still use `net.fc.weight`."""

    proxied: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(self.proxied), name)
