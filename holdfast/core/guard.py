"""A defence never sees who is malicious: asking for it ends the run."""

from __future__ import annotations

from typing import Any

from holdfast.core.errors import RunError

_TRUTH = {"malicious", "attackers", "attack", "adversary", "benign", "truth", "ground_truth"}


class Guarded:
    """Base class of what the server side receives. The error is not an AttributeError, so neither hasattr nor
    getattr with a default can avoid it."""

    def __getattr__(self, name: str) -> Any:
        if name in _TRUTH:
            raise RunError(
                f"round {self.round}: the server side asked for '{name}', but a defence never sees who is"
                " malicious"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
