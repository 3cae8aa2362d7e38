"""What the studies of one paper have in common, written once in holdfast/papers/shared: datasets, attacks, methods, tuned settings.

A study names it (shared = "fedcap") and says `axes.dataset = ["CIFAR-10"]` where it wants those labels of the shared axis; an axis given as
a table is its own. Conditions are cut down to the labels that the study has: what speaks only of others, or of an axis it does not have,
is left away. What the study says itself comes later, and wins; stand-ins of its own replace the shared ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.core.errors import ConfigError, suggest

Table = Mapping[str, Any]
_CONDITIONAL = ("override", "authors")


def completed(own: Table, shared: Table, key: str) -> dict[str, Any]:
    axes = {name: _picked(name, labels, shared.get("axes", {}), key) for name, labels in own.get("axes", {}).items()}
    out = {**shared, **own, "axes": axes, "config": _merged(shared.get("config", {}), own.get("config", {}))}
    for name in _CONDITIONAL:
        out[name] = [*_fitting(shared.get(name, ()), axes), *own.get(name, ())]
    out["stand_in"] = own.get("stand_in", _fitting(shared.get("stand_in", ()), axes))
    scales = {**shared.get("scale", {}), **own.get("scale", {})}
    out["scale"] = {name: _scale(own.get("scale", {}).get(name, {}), shared.get("scale", {}).get(name, {}), axes) for name in scales}
    return out


def _picked(axis: str, labels: Any, axes: Table, key: str) -> Any:
    if not isinstance(labels, list):
        return labels
    known = axes.get(axis, {})
    for label in labels:
        if label not in known:
            raise ConfigError(f"{key}: the shared axis '{axis}' has no '{label}'{suggest(label, known)}")
    return {label: known[label] for label in labels}


def _scale(own: Table, shared: Table, axes: Table) -> dict[str, Any]:
    stand_in = own.get("stand_in", _fitting(shared.get("stand_in", ()), axes))
    override = [*_fitting(shared.get("override", ()), axes), *own.get("override", ())]
    return {**own, "set": {**shared.get("set", {}), **own.get("set", {})}, "override": override, "stand_in": stand_in}


def _fitting(many: Iterable[Table], axes: Table) -> list[dict[str, Any]]:
    out = []
    for one in many:
        when = {axis: [label for label in _listed(labels) if label in axes.get(axis, {})] for axis, labels in one.get("when", {}).items()}
        if all(when.values()):
            out.append({**one, "when": when})
    return out


def _listed(labels: Any) -> list[str]:
    return [labels] if isinstance(labels, str) else list(labels)


def _merged(first: Any, second: Any) -> Any:
    """The second wins, table by table."""
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return second
    return {**first, **{name: _merged(first.get(name), value) for name, value in second.items()}}
