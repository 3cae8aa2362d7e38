"""A module in the place of another one of its own: whoever looks for what that one has, finds it."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn


class ProxyModule(nn.Module):
    """What it does not have itself is looked for in the submodule that it stands for, so that a user's loss
    may go on to say `net.fc.weight`."""

    proxied: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(self.proxied), name)
