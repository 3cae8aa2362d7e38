"""A module of the user's own as a run's model: how it is built, which submodule is its head."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import nn

from holdfast.core.errors import ConfigError, suggest
from holdfast.core.registry import Part

_log = logging.getLogger("holdfast.models")
_serial = itertools.count()
_bare: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Serials of modules and functions that were given without a `Model` around them."""


class Model:
    """A module of your own, or a function that builds one, with the name of the submodule that is its head.

    >>> run = holdfast.run(model=holdfast.Model(Net, head="fc"))

    A function is called without arguments or, if it has two, with the shape of a sample and the number of
    classes; then the start depends on the run's seed. `weights` is a safetensors file with the module's own
    names to start from, with the file's head or with its own (`weights_head="fresh"`)."""

    def __init__(
        self,
        module: nn.Module | Callable[..., nn.Module],
        head: str | None = "head",
        weights: str | Path | None = None,
        weights_head: Literal["file", "fresh"] = "file",
    ):
        if weights_head not in ("file", "fresh"):
            raise ConfigError(f'Model: weights_head is "file" or "fresh", not {weights_head!r}')
        # a copy each time: the user's own module is read, never written
        self.make: Callable[..., nn.Module] = (
            (lambda: copy.deepcopy(module)) if isinstance(module, nn.Module) else module
        )
        self.source = module
        self.head, self.weights, self.weights_head = head, weights, weights_head
        self.finds_head = False
        self.serial = next(_serial)
        """Unique in this process; a memory address may be reused by a later object."""

    @classmethod
    def around(cls, module: nn.Module | Callable[..., nn.Module]) -> Model:
        """Return the model of a bare module or function: its head is found when the classes are known. The
        same object is the same model, so experiments that share it train together."""
        model = cls(module, head=None)
        model.finds_head = True
        model.serial = _bare.setdefault(module, model.serial)
        return model

    @property
    def takes_data(self) -> bool:
        """Whether the function wants the shape of a sample and the number of classes."""
        if isinstance(self.source, nn.Module):
            return False
        try:
            asked = inspect.signature(self.source).parameters.values()
        except (TypeError, ValueError):  # some built-in functions have no signature
            return False
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return sum(one.kind in positional and one.default is one.empty for one in asked) == 2


def is_bare(chosen: Any) -> bool:
    """Whether a config's `model` is a module, or a class or function that builds one."""
    is_part = isinstance(chosen, Part) or inspect.isclass(chosen) and issubclass(chosen, Part)
    return callable(chosen) and not is_part


def with_head(module: nn.Module, head: str | None) -> nn.Module:
    """Return the module after checking that it has a submodule with the name of its head. This is checked
    before the module is wrapped, so that the error lists the user's names."""
    if head and not any(name == head for name, _ in module.named_modules()):
        raise ConfigError(
            f"model: no submodule named '{head}' for the"
            f" head{suggest(head, [n for n, _ in module.named_children()])}"
        )
    return module


def find_head(module: nn.Module, classes: int, name: str) -> str | None:
    """Return the name of the only linear layer with one output per class; None if the module is that layer
    itself."""
    found = [
        path
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and layer.out_features == classes
    ]
    if len(found) == 1:
        if found[0]:
            _log.info("model '%s': its head is '%s', the linear layer with %d outputs", name, *found, classes)
        return found[0] or None
    have = f"{len(found)} linear layers ({', '.join(found)}) have" if found else "no linear layer has"
    raise ConfigError(
        f"model '{name}': {have} {classes} outputs, one per class, so its head is not known; name the"
        " submodule, as in holdfast.Model(module, head='fc'), or give head=None for methods that need no head"
    )
