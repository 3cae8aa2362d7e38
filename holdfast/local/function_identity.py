"""Deciding whether two functions are the same, so that a program made from one of them serves for the other.

A method may write its loss as a closure, made anew in every round. If what it closes over is the same, it is
the same function, and one program serves. If it closes over tensors, or over objects that hold some, a
program would keep using the old ones: no program is made from such a function. Tensors belong in `aux`."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor


class HoldsTensors(Exception):
    """The function holds tensors of its own."""


class ByIdentity:
    """Wraps an object so that it is equal only to itself; keeps it alive, so that its address is not used
    again."""

    def __init__(self, thing: object):
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def same(thing: Any, inside: tuple[int, ...] = ()) -> Any:
    """Something hashable that is equal for functions that do the same. `inside` are the addresses of what is
    being looked through."""
    if thing is None or isinstance(thing, (bool, int, float, str, bytes)):
        return (type(thing), thing)
    if isinstance(thing, (type, types.ModuleType, types.BuiltinFunctionType)):
        return ByIdentity(thing)
    if id(thing) in inside:
        raise HoldsTensors("itself")
    deeper = (*inside, id(thing))
    if isinstance(thing, tuple):
        return tuple(same(part, deeper) for part in thing)
    if isinstance(thing, functools.partial):
        return same((thing.func, thing.args, *_sorted(thing.keywords)), deeper)
    if isinstance(thing, types.MethodType):
        return same((thing.__func__, thing.__self__), deeper)
    if isinstance(thing, types.FunctionType):
        return _function(thing, deeper)
    if hasattr(type(thing), "stands_for"):  # it defines itself what counts
        return same(_as_tuples(type(thing).stands_for(thing)), deeper)
    if isinstance(
        thing, BaseModel
    ):  # a part chosen by name: every experiment has its own, and equal settings mean the same
        return ByIdentity(type(thing)), same(_as_tuples(held_by(thing)), deeper)
    if isinstance(thing, (Tensor, dict, list, set)) or not hasattr(thing, "__dict__"):
        raise HoldsTensors(f"a {type(thing).__name__}")
    return ByIdentity(type(thing)), same(_sorted(vars(thing)), deeper)  # an object is what it holds now


def _as_tuples(data: Any) -> Any:
    """Lists and tables of settings, which do not change, as tuples."""
    if isinstance(data, Mapping):
        return tuple(
            (str(key), _as_tuples(value))
            for key, value in sorted(data.items(), key=lambda pair: str(pair[0]))
        )
    return tuple(_as_tuples(value) for value in data) if isinstance(data, (list, tuple)) else data


def _sorted(table: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(table.items()))


def _function(function: types.FunctionType, inside: tuple[int, ...]) -> Any:
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    try:
        held = same((function.__defaults__, _sorted(function.__kwdefaults__ or {}), cells), inside)
    except HoldsTensors as found:
        raise HoldsTensors(f"{function.__qualname__} closes over {found}; hand tensors to `aux`") from None
    return function.__code__, ByIdentity(function.__globals__), held


_PLAIN = (bool, int, float, complex, str, bytes, type, Enum, PurePath, np.generic, torch.dtype, torch.device)


def identity(thing: Any) -> Any:
    """Something hashable that is equal for two settings only where they are the same: plain data and parts by
    value, with their types, since True == 1 == 1.0; any other object only to itself, whatever its class calls
    equal."""
    if thing is None or isinstance(thing, _PLAIN):
        return type(thing), thing
    if isinstance(thing, (list, tuple)):
        return type(thing), tuple(identity(part) for part in thing)
    if isinstance(thing, (set, frozenset)):
        return type(thing), frozenset(identity(part) for part in thing)
    if isinstance(thing, Mapping):
        return type(thing), frozenset((identity(key), identity(value)) for key, value in thing.items())
    if isinstance(thing, BaseModel):
        return type(thing), identity(held_by(thing))
    if isinstance(thing, types.MethodType):  # bound methods are made anew at each access
        return ByIdentity(thing.__self__), ByIdentity(thing.__func__)
    return ByIdentity(thing)


def held_by(thing: BaseModel) -> dict[str, Any]:
    """All that a part holds: its settings, and what its class keeps beside them."""
    return {**dict(thing), **(thing.__pydantic_private__ or {})}


def name_of(thing: Any) -> str:
    """A class or function by name and address: a factory, or a cell of a notebook that is run again, makes
    several of one name."""
    return f"{thing.__module__}.{thing.__qualname__}@{id(thing):x}"


def described(settings: Mapping[str, Any]) -> str:
    """Settings as a text that is equal only where the settings are, whatever the repr of an object says:
    objects are numbered in the order in which they are seen. They are kept alive, so that no newer object is
    taken for an older one."""
    return f"settings {_numbers.setdefault(identity(settings), len(_numbers))}"


_numbers: dict[Any, int] = {}
