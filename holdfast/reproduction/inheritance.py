"""Completes a study that states only what differs from another: `like = "fedcpa-table-1"`, or
`like = "shared/fedcap"` for what the studies of one paper have in common.

* Of axes, metrics and print, and of a section of config or of a scale (config.data.clients,
  scale.quick.keep), what the study says replaces the other's entry by entry; a part (partition = { name = ...
  }) is one entry.
* `dataset = ["CIFAR-10"]` takes these labels of the other's axis; a table is an axis of its own.
* An empty entry ({} or []) removes one.
* Entries of the other that apply to some labels only (override, authors, stand_in, on_request) are restricted
  to the labels that are left; an entry for other labels, or for an axis that was removed, is dropped. The
  study's own overrides come after the inherited ones and win; so do those of `authors`. Its own stand-ins
  replace the inherited ones.
* Everything else is replaced as a whole. `printed` is always its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.core.errors import ConfigError, suggest
from holdfast.experiment.config_tables import PART_SECTIONS

Table = Mapping[str, Any]
_BY_ENTRY = {"config": 2, "axes": 1, "metrics": 1, "print": 1, "scale": 2}
"""How many levels deep single entries are replaced."""
_ADDED = ("override", "authors")


def completed(own: Table, other: Table, key: str) -> dict[str, Any]:
    """Return a study, completed by what it inherits from the other."""
    picked = {
        axis: _picked(axis, labels, other.get("axes", {}), key)
        for axis, labels in own.get("axes", {}).items()
    }
    own = {**own, "axes": picked}
    merged = {
        name: _merged(other.get(name, {}), own.get(name, {}), depth) for name, depth in _BY_ENTRY.items()
    }
    out = {
        **other,
        **own,
        **merged,
        **_conditions(own, other, merged["axes"], (*_ADDED, "stand_in", "on_request")),
    }
    for name, scale in out["scale"].items():
        mine, others = (table.get("scale", {}).get(name, {}) for table in (own, other))
        out["scale"][name] = {**scale, **_conditions(mine, others, out["axes"], ("override", "stand_in"))}
    if "printed" not in own:
        out.pop("printed", None)
    return out


def _picked(axis: str, labels: Any, axes: Table, key: str) -> Any:
    if not isinstance(labels, list):
        return labels
    known = axes.get(axis, {})
    for label in labels:
        if label not in known:
            raise ConfigError(
                f"{key}: the axis '{axis}' of what it is like has no '{label}'{suggest(label, known)}"
            )
    return {label: known[label] for label in labels}


def _merged(other: Table, own: Table, depth: int) -> dict[str, Any]:
    out = {**other, **own}
    for name in other.keys() & own.keys() if depth > 1 else ():
        if (
            isinstance(other[name], Mapping) and isinstance(own[name], Mapping) and name not in PART_SECTIONS
        ):  # a part is one thing
            out[name] = _merged(other[name], own[name], depth - 1)
    return {name: entry for name, entry in out.items() if entry != {}}


def _conditions(own: Table, other: Table, axes: Table, names: Sequence[str]) -> dict[str, Any]:
    """Return the entries that apply to some labels only, of a study or of one of its scales."""
    out = {}
    for name in names:
        mine, inherited = own.get(name), _fitting(other.get(name, ()), axes)
        out[name] = inherited if mine is None else [*inherited, *mine] if mine and name in _ADDED else mine
    return out


def _fitting(many: Iterable[Table], axes: Table) -> list[dict[str, Any]]:
    out = []
    for one in many:
        when = {axis: _left(labels, axes.get(axis, {})) for axis, labels in one.get("when", {}).items()}
        if all(when.values()):
            out.append({**one, **({"when": when} if when else {})})
    return out


def _left(labels: Any, known: Table) -> Any:
    """Return the labels that are left; a single label stays a string."""
    if isinstance(labels, str):
        return labels if labels in known else ""
    return [label for label in labels if label in known]
