"""Expand one config into a table of experiments: lists under [sweep] give a grid, [[sweep.override]] sets
values for some cells."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from holdfast.core.errors import ConfigError, HoldfastError, suggest
from holdfast.core.registry import parts
from holdfast.core.sections import elsewhere
from holdfast.data.handed.data import data_of
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.config_tables import PART_SECTIONS, LaidOver, assign, merge, rank
from holdfast.experiment.object_names import Numbers, numbered, short

Settings = dict[str, Any]
_TOLD_BY_NAME = PART_SECTIONS - {"loss"}
"""Parts whose names say what they are; a function that is a loss may have any name."""
MOST_CELLS = 100_000  # limit of a grid: a few lines of a file may ask for any number


def expand(table: Mapping[str, Any]) -> list[tuple[str, Settings]]:
    """Return (label, config table) of every cell, in the order of the grid; a config without [sweep] is one
    cell with an empty label."""
    cells = combinations(table)
    numbers = _numbers(cells)
    labels = _unique([label(chosen, numbers) for chosen, _ in cells])
    return [(name, cell) for name, (_, cell) in zip(labels, cells, strict=True)]


def combinations(table: Mapping[str, Any]) -> list[tuple[Settings, Settings]]:
    """Return (values of the sweep's axes, config table) of every cell. [tune] belongs to `holdfast tune` and
    is ignored."""
    base = copied(table)
    base.pop("tune", None)
    sweep = base.pop("sweep", {})
    for key in base:
        if key not in Config.model_fields:
            known = [*Config.model_fields, "sweep", "tune"]
            raise ConfigError(f"unknown key '{key}'{elsewhere(key, Config) or suggest(key, known)}")
    if not isinstance(sweep, Mapping):
        raise ConfigError('sweep: must be a table of lists, for example "method.name" = ["fedavg", "ditto"]')
    sweep = dict(sweep)
    overrides = sweep.pop("override", [])
    if not isinstance(overrides, list):
        raise ConfigError("sweep.override: write [[sweep.override]], once for each override")
    for override in overrides:
        _check(override)
    axes = flatten(sweep)
    for path, values in axes.items():
        section = path.split(".")[0]
        if section not in Config.model_fields:
            known = [*Config.model_fields, "override"]
            raise ConfigError(
                f"unknown key 'sweep.{section}'{elsewhere(section, Config) or suggest(section, known)}"
            )
        if not isinstance(values, list) or not values:
            raise ConfigError(f"sweep.{path}: needs a list of values, got {values!r}")
    if "data" in axes:
        axes["data"] = [data_of(value) or value for value in axes["data"]]
    if "privacy" in axes:  # else a table that names the noise alone would reset what is protected, and how
        axes["privacy"] = [
            LaidOver(value) if isinstance(value, Mapping) else value for value in axes["privacy"]
        ]
    if (many := math.prod(map(len, axes.values()))) > MOST_CELLS:
        raise ConfigError(
            f"sweep: {many:,} cells are more than the limit of {MOST_CELLS:,}; shorten its lists"
        )
    cells = []
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        cell = copied(base)
        for path in sorted(chosen, key=rank):
            if isinstance(value := chosen[path], LaidOver):
                cell = merge(cell, _nested(path, value))
            else:
                assign(cell, path, value)
        for override in overrides:
            _override(cell, override)
        cells.append((chosen, cell))
    return cells


def configs(table: Mapping[str, Any]) -> list[tuple[str, Config]]:
    """Return (label, config) of every cell, checked; an error names the cell it is in."""
    tables = expand(table)
    numbers = _numbers(combinations(table))
    _warn_of_idle_overrides(table)
    cells = []
    for name, cell in tables:
        try:
            made = make_config(cell).numbered(numbers)
            made.parts()
        except HoldfastError as error:
            raise type(error)(
                f"{error} (in the sweep's cell '{name}')" if len(tables) > 1 else str(error)
            ) from None
        cells.append((name, made))
    return cells


def copied(table: Any) -> Any:
    """Copy tables and lists; objects (a module, a loss) stay the same ones, so that cells that share them can
    be fused."""
    if isinstance(table, Mapping):
        same = {key: copied(value) for key, value in table.items()}
        return LaidOver(same) if isinstance(table, LaidOver) else same
    return [copied(value) for value in table] if isinstance(table, list) else table


def label(chosen: Mapping[str, Any], numbers: Numbers | None = None) -> str:
    """Return what distinguishes a cell from its neighbours: 'ditto lam=0.1 seed=1'."""
    return " ".join(_words(path, value, numbers or {}) for path, value in chosen.items())


def _words(path: str, value: Any, numbers: Numbers) -> str:
    key = path.removesuffix(".name").rpartition(".")[2]
    words = short(value, numbers)
    section = isinstance(value, Mapping) and (key == "data" or "name" not in value)
    if path.endswith(".name") or key in _TOLD_BY_NAME or section:
        return f"{key}=none" if words == "none" and key != "attack" else words
    return f"{key}={words}"


def _unique(labels: list[str]) -> list[str]:
    """Number the labels that occur more than once, from the second on."""
    met: dict[str, int] = {}
    out = []
    for name in labels:
        met[name] = met.get(name, 0) + 1
        out.append(name if met[name] == 1 else f"{name} #{met[name]}")
    return out


def _nested(path: str, value: Any) -> Settings:
    """Return {"data": {"partition": value}} for data.partition."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def _numbers(cells: list[tuple[Settings, Settings]]) -> Numbers:
    return numbered(value for chosen, _ in cells for value in chosen.values())


def _check(override: Any) -> None:
    tables = override if isinstance(override, Mapping) else {}
    if (
        "set" not in tables
        or set(tables) - {"when", "set"}
        or not all(isinstance(table, Mapping) for table in tables.values())
    ):
        raise ConfigError(
            "sweep.override: expected a table `set` and optionally a table `when`, nothing else"
        )
    for path, value in flatten(tables.get("when", {})).items():
        _check_key(path)
        kind = path.removesuffix(".name").rpartition(".")[2]
        if kind in PART_SECTIONS and isinstance(value, str) and (path == kind or path.endswith(".name")):
            _check_part(path, kind, value)


def _check_key(path: str) -> None:
    """Check that a config can have such a key: an override with an unknown condition would silently never
    apply."""
    at: type[BaseModel] = Config
    known = set(at.model_fields)
    for step in path.split("."):
        if step not in known:
            raise ConfigError(f"unknown key 'sweep.override.when.{path}'{suggest(step, known)}")
        if step in PART_SECTIONS:  # the part may be one of the sweep's axes
            known = {"name", "wrap"}.union(*(part.model_fields for part in parts(step).values()))
            continue
        kind = at.model_fields[step].annotation if step in at.model_fields else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return
        known, at = set(kind.model_fields), kind


def _check_part(path: str, kind: str, name: str) -> None:
    """Refuse a part that no cell can have."""
    known = {*parts(kind), *({"none"} if kind in ("attack", "server", "schedule") else ())}
    if name not in known and ":" not in name:  # "torch:NAdam" is found when it is used
        raise ConfigError(f"sweep.override.when.{path}: unknown {kind} '{name}'{suggest(name, known)}")


def _warn_of_idle_overrides(table: Mapping[str, Any]) -> None:
    """Warn of overrides that no cell fits. A grid may have been made smaller, so this is no error."""
    overrides = (table.get("sweep") or {}).get("override", [])
    if not overrides:
        return
    plain = {**table, "sweep": {**table["sweep"], "override": []}}
    cells = [cell for _, cell in combinations(plain)]
    for override in overrides:
        when = flatten(override.get("when", {}))
        if not any(_fits(cell, when) for cell in cells):
            wanted = " and ".join(f"{path} = {value!r}" for path, value in when.items())
            warnings.warn(
                f"sweep.override: no cell has {wanted}, so this override changes nothing; correct its"
                " `when`, or remove it",
                UserWarning,
                stacklevel=3,
            )
        for cell in cells:
            _override(cell, override)  # the next one may look at what this one set


def _fits(cell: Settings, when: Settings) -> bool:
    return all(_lookup(cell, _DEFAULTS, path.split(".")) == value for path, value in when.items())


def _override(cell: Settings, override: Mapping[str, Any]) -> None:
    if _fits(cell, flatten(override.get("when", {}))):
        for path, value in sorted(flatten(override["set"]).items(), key=lambda pair: rank(pair[0])):
            assign(cell, path, value)


def flatten(table: Mapping[str, Any], prefix: str = "") -> Settings:
    """Return values by dotted path; quoted dotted keys and nested tables mean the same. An empty table is a
    value."""
    out: Settings = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        out |= flatten(value, path + ".") if isinstance(value, Mapping) and value else {path: value}
    return out


def _lookup(table: Any, default: Any, path: list[str]) -> Any:
    """Return a cell's value, or the default where it has none. A part that is named has none of the default
    part's settings."""
    if not path:
        return table
    step, rest = path[0], path[1:]
    if not isinstance(table, Mapping):
        return table if isinstance(table, str) and path == ["name"] else None
    below = default.get(step) if isinstance(default, Mapping) else None
    if step not in table:
        return _lookup(below, {}, rest)
    return _lookup(table[step], {} if step in PART_SECTIONS else below, rest)


_DEFAULTS = Config().plain()
