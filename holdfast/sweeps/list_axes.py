"""Lists as axes: where a config that is given in Python has a list and its setting wants one value, the list
is an axis of the grid. `train={"lr": [0.1, 0.01]}` means `sweep={"train.lr": [0.1, 0.01]}`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter

from holdfast.core.errors import ConfigError
from holdfast.core.registry import INVALID, is_section, parts
from holdfast.data.handed.data import Data
from holdfast.data.handed.entries import is_entry
from holdfast.experiment.config import Config
from holdfast.experiment.config_tables import PART_SECTIONS, LaidOver, merge
from holdfast.sweeps.grid import Settings, flatten

_LISTS = (list, tuple, range)


def with_list_axes(table: Mapping[str, Any]) -> Settings:
    """The same config with its lists as axes under "sweep". A list under "sweep" stays as it is, unless a
    section has a list for the same setting."""
    axes: dict[str, list[Any]] = {}
    sections = {name: given for name, given in table.items() if name not in ("sweep", "tune")}
    out = _without_axes(sections, [Config], "", axes)
    out |= {name: table[name] for name in ("sweep", "tune") if name in table}
    return {**out, "sweep": _joined(table.get("sweep") or {}, axes)} if axes else out


def laid_over(table: Mapping[str, Any], sections: Mapping[str, Any]) -> Settings:
    """A config with keyword sections laid over it, key by key, and the lists of both as axes."""
    check_not_swept(sections, table.get("sweep"))
    base, over = with_list_axes(table), with_list_axes(sections)
    if not isinstance(sweep := over.get("sweep"), Mapping):
        return merge(base, over)
    out = merge(base, {name: given for name, given in over.items() if name != "sweep"})
    return {**out, "sweep": _joined(base.get("sweep") or {}, sweep)}


def _joined(before: Any, axes: Mapping[str, Any]) -> Settings:
    """The axes of a sweep with others laid over it: one over the same setting takes its place."""
    if not isinstance(before, Mapping):
        return dict(axes)  # the grid would refuse what was there
    kept = flatten({name: given for name, given in before.items() if name != "override"})
    added = flatten({name: given for name, given in axes.items() if name != "override"})
    replaced = {part_of(path) for path in added}
    out = {path: values for path, values in kept.items() if part_of(path) not in replaced} | added
    overrides = axes.get("override", before.get("override"))
    return out if overrides is None else {**out, "override": overrides}


def settled(table: Mapping[str, Any]) -> Settings:
    """The same grid without values that are laid over a section: each is the whole section, as a file needs
    it."""
    sweep = table.get("sweep")
    if not isinstance(sweep, Mapping):
        return dict(table)
    out = {}
    for path, values in sweep.items():
        if isinstance(values, list) and any(isinstance(value, LaidOver) for value in values):
            values = [
                _whole(table, path.split("."), value) if isinstance(value, LaidOver) else value
                for value in values
            ]
        out[path] = values
    return {**table, "sweep": out}


def _whole(table: Mapping[str, Any], steps: Sequence[str], value: Mapping[str, Any]) -> Any:
    below: Any = table
    for step in steps[:-1]:
        below = below.get(step, {}) if isinstance(below, Mapping) else {}
    there = {steps[-1]: below[steps[-1]]} if isinstance(below, Mapping) and steps[-1] in below else {}
    return merge(there, {steps[-1]: dict(value)})[steps[-1]]


def check_not_swept(sections: Mapping[str, Any], swept: Any) -> None:
    """Refuse one value for a setting over which the config sweeps: the sweep would win, silently."""
    if not isinstance(swept, Mapping):
        return
    axes = {part_of(path) for path in flatten({k: v for k, v in swept.items() if k != "override"})}
    for path, value in flatten({k: v for k, v in sections.items() if k not in ("sweep", "tune")}).items():
        if part_of(path) in axes and not isinstance(value, _LISTS):
            raise ConfigError(
                f"{part_of(path)}: the config sweeps over it, so one value would have no effect; give a list"
            )


def part_of(path: str) -> str:
    """`method` for both `method` and `method.name`."""
    return path.removesuffix(".name")


def _without_axes(
    table: Mapping[str, Any], models: Sequence[type[BaseModel]], path: str, axes: dict[str, list[Any]]
) -> Settings:
    """A table without its axes, which are added to `axes` by their dotted keys. `models` say which settings
    are lists by nature; they are several where a part is an axis itself."""
    out: Settings = {}
    for key, given in table.items():
        inner = f"{path}{key}"
        if inner == "data" and isinstance(given, Mapping) and any(map(is_entry, given.values())):
            out[key] = given  # the samples of clients, by their names
        elif isinstance(given, Mapping) and (below := _models_of(key, given, models, table)):
            out[key] = _without_axes(given, below, f"{inner}.", axes)
        elif isinstance(given, _LISTS) and _is_axis(key, given, models):
            name, values = _axis(key, inner, list(given), bool(_models_of(key, {}, models, table)))
            axes[name] = values
        else:
            out[key] = list(given) if isinstance(given, range) else given
    return out


def _axis(key: str, path: str, values: list[Any], section: bool) -> tuple[str, list[Any]]:
    """The key of an axis and its values. Names of parts only choose the part; a table changes what it
    names, of a part and of a section such as [privacy]."""
    if (key in PART_SECTIONS or key == "data") and values and all(isinstance(v, str) for v in values):
        return f"{path}.name", values
    if not section and key not in PART_SECTIONS and key != "data":
        return path, values
    by_name = key in PART_SECTIONS or key == "data"
    named = [{"name": value} if by_name and isinstance(value, str) else value for value in values]
    return path, [LaidOver(value) if isinstance(value, Mapping) else value for value in named]


def _models_of(
    key: str, given: Mapping[str, Any], models: Sequence[type[BaseModel]], around: Mapping[str, Any]
) -> list[type[BaseModel]]:
    """What may stand in a table: a section, or the settings of the part that it names."""
    if key in PART_SECTIONS:
        known = parts(key)
        return [known[name] for name in _names(given.get("name")) if name in known] or list(known.values())
    if key == "options":
        known = parts("source")
        return [known[name] for name in _names(around.get("name", "digits")) if name in known]
    found = [model.model_fields[key].annotation for model in models if key in model.model_fields]
    kinds = [kind for one in found for kind in (one, *get_args(one))]  # [privacy] may also be absent: a union
    return [kind for kind in kinds if isinstance(kind, type) and is_section(kind)]


def _names(given: Any) -> Iterable[str]:
    return [name for name in (given if isinstance(given, _LISTS) else [given]) if isinstance(name, str)]


def _is_axis(key: str, given: Sequence[Any], models: Sequence[type[BaseModel]]) -> bool:
    if key in PART_SECTIONS or key == "name":
        return True
    if key == "data":
        return bool(given) and all(map(_is_dataset, given))
    fields = [model.model_fields[key] for model in models if key in model.model_fields]
    if key == "wrap" or any(_takes_lists(field.annotation) for field in fields):
        return (
            len(given) > 0
            and all(isinstance(value, _LISTS) for value in given)
            and not any(_fits(field.annotation, given) for field in fields if key != "detectors")
        )
    return bool(fields)


def _is_dataset(given: Any) -> bool:
    """Whether an element of a list under `data` is a whole dataset, and not the samples of one client."""
    if isinstance(given, Mapping):
        section = Config.model_fields["data"].annotation
        return bool(given) and isinstance(section, type) and set(given) <= set(section.model_fields)
    return isinstance(given, (str, Data))


def _takes_lists(kind: Any) -> bool:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(map(_takes_lists, get_args(kind)))
    if origin is Annotated:
        return _takes_lists(get_args(kind)[0])
    return (origin or kind) in (list, tuple, set, frozenset, Sequence)


def _fits(kind: Any, given: Sequence[Any]) -> bool:
    try:
        TypeAdapter(kind).validate_python(list(given))
    except INVALID:
        return False
    return True
