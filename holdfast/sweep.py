"""A table of experiments from one config: lists under [sweep] expand to a grid, [[sweep.override]] sets values for some cells."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

from holdfast.config import assign
from holdfast.core.errors import ConfigError

Table = dict[str, Any]


def expand(table: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """(label, config table) of every cell, in the order of the grid; a config without [sweep] is one cell with an empty label."""
    base = copy.deepcopy(dict(table))
    sweep = base.pop("sweep", {})
    if not isinstance(sweep, Mapping):
        raise ConfigError("sweep: must be a table of lists, for example \"method.name\" = [\"fedavg\", \"ditto\"]")
    sweep = dict(sweep)
    overrides = sweep.pop("override", [])
    axes = dict(_flatten(sweep))
    for path, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"sweep.{path}: needs a list of values, got {values!r}")
    cells = []
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        cell = copy.deepcopy(base)
        for path in sorted(chosen, key=lambda p: not p.endswith(".name")):  # a part's name first: naming it resets its settings
            assign(cell, path, chosen[path])
        for override in overrides:
            _override(cell, override)
        cells.append((label(chosen), cell))
    return cells


def label(chosen: Mapping[str, Any]) -> str:
    """What tells a cell from its neighbours: 'ditto seed=1'."""
    words = [str(value) if path.endswith(".name") else f"{path.rpartition('.')[2]}={value}" for path, value in chosen.items()]
    return " ".join(words)


def _override(cell: Table, override: Mapping[str, Any]) -> None:
    unknown = set(override) - {"when", "set"}
    if unknown or not isinstance(override.get("set"), Mapping):
        raise ConfigError("sweep.override: needs a table `set` and may have a table `when`, nothing else")
    if all(_lookup(cell, path) == value for path, value in _flatten(override.get("when", {}))):
        for path, value in _flatten(override["set"]):
            assign(cell, path, value)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted paths of a table's values; quoted dotted keys and nested tables mean the same."""
    out = []
    for key, value in table.items():
        path = f"{prefix}{key}"
        out.extend(_flatten(value, path + ".") if isinstance(value, Mapping) else [(path, value)])
    return out


def _lookup(table: Any, path: str) -> Any:
    for step in path.split("."):
        if isinstance(table, str) and step == "name":
            return table
        if not isinstance(table, Mapping) or step not in table:
            return None
        table = table[step]
    return table
