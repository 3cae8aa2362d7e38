"""A defence never sees who is malicious: asking for it ends the run."""

from __future__ import annotations

from typing import Any

from holdfast.core.errors import RunError

_TRUTH = {"malicious", "attackers", "attack", "adversary", "benign", "truth", "ground_truth"}


class Guarded:
    """For what the server side is handed. Not an AttributeError, so that neither hasattr nor getattr with a
    default gets past it."""

    def __getattr__(self, name: str) -> Any:
        if name in _TRUTH:
            raise RunError(
                f"round {self.round}: the server side asked for '{name}', but a defence never sees who is"
                " malicious"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
