"""Configs as plain tables: read from TOML, changed by --set, laid over each other. A sweep and `holdfast.run`
work on them before a typed config is made."""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from holdfast.aggregators.base import Aggregator
from holdfast.attacks.base import Attack
from holdfast.core.errors import ConfigError
from holdfast.core.reading import bounded, read_toml
from holdfast.core.registry import Part
from holdfast.data.handed.data import Data, data_of, merged, section_of
from holdfast.experiment.config import Config
from holdfast.local.optimizers.base import Optimizer
from holdfast.local.schedules import Schedule
from holdfast.server_optimizers.base import ServerOptimizer

_DEEPEST = 16  # sections within each other that a key may name
PART_SECTIONS = {
    "method",
    "model",
    "aggregator",
    "server",
    "attack",
    "trigger",
    "partition",
    "loss",
    "optimizer",
    "schedule",
}
_COMMON = {
    "attack": set(Attack.model_fields),
    "aggregator": {*Aggregator.model_fields, "wrap"},
    "server": set(ServerOptimizer.model_fields),
    "optimizer": set(Optimizer.model_fields),
    "schedule": set(Schedule.model_fields),
}
"""Settings that every part of a kind has: a sweep over attacks keeps the same attackers, one over rules the
same assumptions, one over server optimisers the learning rate, if one is set, one over schedules the
warm-up."""


class LaidOver(dict[str, Any]):
    """A value of a sweep's axis that changes only the keys that it names, as a keyword section does."""


def read_config(file: str | Path | None, changes: Sequence[str] = ()) -> dict[str, Any]:
    """A TOML file (or nothing) with --set changes applied, as plain tables; may hold a [sweep] section."""
    table: dict[str, Any] = {}
    if file is not None:
        path = Path(file)
        try:
            table = read_toml(path)
        except FileNotFoundError:
            raise ConfigError(
                f"config file not found: {file}; `holdfast show config` lists what one may hold"
            ) from None
        except IsADirectoryError:
            there = (path / "manifest.json").exists() or (path / "sweep.json").exists()
            mend = (
                f"`holdfast resume {shlex.quote(str(file))}` continues a run"
                if there
                else "name the TOML file in it"
            )
            raise ConfigError(f"{file} is a folder, not a config file; {mend}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"config file {file} cannot be read: it is not text in UTF-8") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"config file {file} cannot be read: {error}") from None
    for key, value in sorted(parse_changes(changes), key=lambda pair: rank(pair[0])):
        assign(table, key, value)
    return table


def parse_changes(changes: Sequence[str]) -> list[tuple[str, Any]]:
    """The keys and values of --set."""
    wanted = []
    for change in changes:
        key, separator, text = change.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--set {change}: write key=value, for example --set train.lr=0.05")
        wanted.append((key.strip(), parse_value(text.strip())))
    return wanted


def rank(path: str) -> tuple[int, bool]:
    """The order in which keys are set: a part's name before its settings, because naming another part resets
    its own."""
    return path.count("."), not path.endswith(".name")


def parse_value(text: str) -> Any:
    """A TOML value where the text is one, else the text itself, so that quotes are not needed."""
    try:
        table = bounded(tomllib.loads(f"value = {text}"))
        return table["value"] if len(table) == 1 else text
    except (ValueError, RecursionError):
        return text


def assign(table: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted key; a part given by its name alone becomes a table when one of its settings is set."""
    *folders, last = path.split(".")
    if len(folders) > _DEEPEST:
        raise ConfigError(f"--set {path[:60]}...: no setting is nested so deeply")
    for folder in folders:
        inner = section_of(table.get(folder)) if folder == "data" else table.get(folder)
        if isinstance(inner, str) and folder in PART_SECTIONS:
            inner = {"name": inner}
        elif isinstance(inner, Mapping):
            inner = dict(inner)
        elif inner is None:
            inner = _default_of(folder)
        else:
            raise ConfigError(f"--set {path}: '{folder}' is not a section")
        table[folder] = inner
        table = inner
    if path == "data" and isinstance(value, Data):  # the other settings of the section stay
        table |= merge(table, {path: value})
        return
    if last == "name" and folders:
        _rename(table, folders[-1], value)
    table[last] = value


def _rename(table: dict[str, Any], section: str, name: Any) -> None:
    """Drop the settings of the old part when another one is named, except those that every part of the kind
    has."""
    if section in PART_SECTIONS and table.get("name", name) != name:
        kept = {key: table[key] for key in table if key in _COMMON.get(section, ())}
        table.clear()
        table |= kept


def merge(table: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """A config with sections laid over it, key by key, as --set would do it: other keys stay as they are. An
    object replaces the whole part."""
    out = dict(table)
    for key, given in sections.items():
        there = out.get(key)
        if key == "data":
            there, given = merged(there, given)
        if isinstance(there, str) and key in PART_SECTIONS:
            there = {"name": there}
        if isinstance(given, str) and key in PART_SECTIONS and isinstance(there, Mapping):
            given = {"name": given}
        if not isinstance(given, Mapping) or not isinstance(there, Mapping):
            if (
                isinstance(given, Mapping)
                and "name" not in given
                and key in PART_SECTIONS
                and there is not None
            ):
                raise ConfigError(
                    f"{key}: the config has a Python object there, whose settings cannot be changed one by"
                    " one; give the whole part again"
                )
            out[key] = given
            continue
        inner = dict(there)
        if isinstance(name := given.get("name"), str):  # in a sweep it is a list
            _rename(inner, key, name)
            if key == "data" and inner.get("name", name) != name:
                inner.pop("options", None)  # they belong to the old dataset
        out[key] = merge(inner, given)
    return out


def as_table(config: Any) -> dict[str, Any]:
    """What a caller gives as a config, as plain tables: tables, the path of a TOML file, or a Config."""
    if config is None or isinstance(config, Mapping):
        return _with_data_read(dict(config or {}))
    if isinstance(config, (str, os.PathLike)):
        return read_config(Path(config))
    if isinstance(config, Config):
        return _set_fields(config)
    shown = repr(config).splitlines()[0][:60]
    raise ConfigError(f"the config must be a table, a Config or the path of a TOML file, not {shown}")


def _set_fields(section: BaseModel) -> dict[str, Any]:
    """What was set in a config, without the defaults; parts stay as they were given."""
    given = {
        name: getattr(section, name)
        for name in type(section).model_fields
        if name in section.model_fields_set
    }
    return {
        name: _set_fields(value) if isinstance(value, BaseModel) and not isinstance(value, Part) else value
        for name, value in given.items()
    }


def _with_data_read(table: dict[str, Any]) -> dict[str, Any]:
    """Tables in which data that is handed over was read, so that this is done once for all cells of a
    sweep."""
    if "data" in table:
        table["data"] = section_of(table["data"])
    sweep = table.get("sweep")
    if isinstance(sweep, Mapping) and isinstance(values := sweep.get("data"), (list, tuple)):
        table["sweep"] = {**sweep, "data": [data_of(value) or value for value in values]}
    return table


def _default_of(section: str) -> dict[str, Any]:
    """Setting one key of a part that was not named means the default part."""
    named = {
        "method": "fedcap",
        "model": "mlp",
        "aggregator": "mean",
        "optimizer": "sgd",
        "schedule": "constant",
    }
    if section in named:
        return {"name": named[section]}
    return {"name": "pathological"} if section == "partition" else {}
