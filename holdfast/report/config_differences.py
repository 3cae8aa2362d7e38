"""What differs between configs: only the keys that do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core.registry import KINDS, parts

MISSING = "–"


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """By dotted key: its value in each config, in their order. Of two different parts (two methods, say)
    their names are given; of the settings that only one of them has, those that differ among its configs and
    those that are not at their defaults."""
    found = _differing(dict(enumerate(configs)), "")
    return {
        path: [values.get(place, MISSING) for place in range(len(configs))] for path, values in found.items()
    }


def _differing(given: dict[int, Any], path: str) -> dict[str, dict[int, Any]]:
    if len({json.dumps(value, sort_keys=True, default=str) for value in given.values()}) < 2:
        return {}
    if not any(isinstance(value, Mapping) for value in given.values()):
        return {path: given}
    tables = {
        place: value if isinstance(value, Mapping) else {"name": value} for place, value in given.items()
    }
    names = {place: table.get("name") for place, table in tables.items()}
    out = {path: names} if len(set(map(str, names.values()))) > 1 else {}
    for key in dict.fromkeys(key for table in tables.values() for key in table if key != "name"):
        inner = f"{path}.{key}" if path else key
        having = {place: table[key] for place, table in tables.items() if key in table}
        groups = [set(tables)] if len(having) == len(tables) else _by_name(names)
        for group in groups:
            told = {place: having.get(place, MISSING) for place in group}
            found = _differing(told, inner)
            if not found and len(group) < len(tables):
                place = min(group)
                found = {inner: told} if _unusual(path, names[place], key, having.get(place, MISSING)) else {}
            for name, values in found.items():
                out[name] = out.get(name, {}) | values
    return out


def _unusual(path: str, part: Any, setting: str, value: Any) -> bool:
    """Whether a setting of a part is known not to be at its default."""
    kind = path.rpartition(".")[2]
    known = parts(kind).get(str(part)) if kind in KINDS and value != MISSING else None
    if known is None or setting not in known.model_fields:
        return False
    field = known.model_fields[setting]
    usual = None if field.is_required() else field.get_default(call_default_factory=True)
    said, default = (json.dumps(one, sort_keys=True, default=str) for one in (value, usual))
    return bool(value != usual) and said != default  # a file has lists where a default is a tuple


def _by_name(names: Mapping[int, Any]) -> list[set[int]]:
    groups: dict[str, set[int]] = {}
    for place, name in names.items():
        groups.setdefault(str(name), set()).add(place)
    return list(groups.values())


def in_short(value: Any, most: int = 40) -> str:
    """For a cell of a table."""
    text = (
        "none"
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, default=str, ensure_ascii=False)
    )
    return text if len(text) <= most else text[: most - 1] + "…"
