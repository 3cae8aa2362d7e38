"""A method that fails in its first round."""

from __future__ import annotations

from typing import Any

from holdfast.core.registry import register
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Method


class Falls(Averaging):
    def round(self, state: Any, ctx: Any) -> Any:
        raise ZeroDivisionError("the server fell")
        yield


FELL = Falls.round.__code__.co_firstlineno + 1


@register("method", "test-cli-falls")
class FallsMethod(Method):
    """Fails."""

    Client, Server = ClientRule, Falls
