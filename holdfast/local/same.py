"""When two functions are the same, as far as a program made from one of them goes.

A method may write its loss as a closure, made anew in every round. If what it closes over is the same, it is the same function, and one
program serves. If it closes over tensors, or over things that hold some, a program would go on with the old ones: such a function is
none to make a program from. Tensors belong into `aux`."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

from pydantic import BaseModel
from torch import Tensor


class HoldsTensors(Exception):
    """The function brings tensors of its own along."""


class Same:
    """Equal to itself only, and keeps the object alive, so that its address stays its own."""

    def __init__(self, thing: object):
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def same(thing: Any) -> Any:
    """Something hashable that is equal for functions that do the same."""
    if thing is None or isinstance(thing, (bool, int, float, str, bytes)):
        return (type(thing), thing)
    if isinstance(thing, tuple):
        return tuple(same(part) for part in thing)
    if isinstance(thing, functools.partial):
        return same(thing.func), same(thing.args), tuple((name, same(value)) for name, value in sorted(thing.keywords.items()))
    if isinstance(thing, types.MethodType):
        return same(thing.__func__), Same(thing.__self__)
    if isinstance(thing, types.FunctionType):
        return _function(thing)
    if isinstance(thing, BaseModel):  # a part chosen by name: every experiment has its own, and equal settings mean the same
        return type(thing), str(thing.model_dump())
    if isinstance(thing, (Tensor, dict, list, set)) or (dataclasses.is_dataclass(thing) and not isinstance(thing, type)):
        raise HoldsTensors(f"a {type(thing).__name__}")
    return Same(thing)


def _function(function: types.FunctionType) -> Any:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    try:
        return function.__code__, same(function.__defaults__), tuple(same(cell) for cell in cells)
    except HoldsTensors as found:
        raise HoldsTensors(f"{function.__qualname__} closes over {found}; hand tensors to `aux`") from None
