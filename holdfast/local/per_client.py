"""Numbers with one value per client, in which the experiments of a stack may differ.

Clients of several experiments are trained as one stack, so a setting such as `lam` is a tensor [n]. Taking one entry of it, or their mean,
for all clients would give every experiment the value of another one, without a sign that something is wrong. `PerClient` refuses that; what
keeps one value per client, and what is computed together with the clients' own tensors, works as with any tensor."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import SettingError

_ONE_FOR_ALL = {
    "item", "__float__", "__int__", "__bool__", "__index__", "__complex__", "__contains__", "mean", "nanmean", "median", "nanmedian", "sum",
    "nansum", "mode", "select", "take", "squeeze",
}  # fmt: skip
_TORCH = str(Path(torch.__file__).parent)


class PerClient(Tensor):
    """One value per client [n]. What is computed from such tensors alone and still has one value per client is one again."""

    what: str

    @classmethod
    def of(cls, values: Tensor, what: str) -> PerClient:
        """`what` names it in an error: "settings.lam"."""
        named = plain(values).as_subclass(cls)
        named.what = what
        return named

    @classmethod
    def named(cls, owner: str, numbers: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """All of them, each under the name by which a client half reads it."""
        return {name: None if values is None else cls.of(values, f"{owner}.{name}") for name, values in numbers.items()}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        mine = [value for value in args if isinstance(value, PerClient)]
        if mine and args[0] is mine[0] and (name in _ONE_FOR_ALL or name == "__getitem__" and _picks_some(args[1])):
            raise SettingError(
                f"{where()}: local.{getattr(mine[0], 'what', 'settings')} has one value per client, because experiments that differ in it "
                "are trained together; compute with the whole tensor (x[:, None] multiplies models [n, size]), or go through its .tolist()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        alone = all(isinstance(value, PerClient) for value in args if isinstance(value, Tensor))
        if mine and alone and type(out) is Tensor and out.ndim == 1 and (name == "__getitem__" or out.shape == mine[0].shape):
            return cls.of(out, getattr(mine[0], "what", "settings"))
        return out


def plain(value: Any) -> Any:
    """The same numbers as an ordinary tensor; anything else as it is."""
    return value.as_subclass(Tensor) if isinstance(value, PerClient) else value


class Settings(SimpleNamespace):
    """The method's real-valued settings, each a `PerClient`."""

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(sorted(vars(self))) or "none"
        raise AttributeError(
            f"local.settings has no '{name}'; it has the real-valued settings of the method ({known}), and the others are in self.method"
        )


def where() -> str:
    """File and line of the code that asked: the innermost frame that is neither this package's guard nor PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_globals.get("__name__") in _GUARDS or frame.f_code.co_filename.startswith(_TORCH)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


_GUARDS = {__name__, "holdfast.methods.client_view", "holdfast.methods.base", "holdfast.core.registry"}


def _picks_some(index: Any) -> bool:
    """Whether an index leaves out clients by their place: x[0], x[:1]. A mask or a list of places is how stacks are cut."""
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, slice):
        return first != slice(None)
    return isinstance(first, int) and not isinstance(first, bool) or isinstance(first, Tensor) and first.ndim == 0
