"""Writing plain tables as TOML: configs that can be copied from a page and run. The standard library only
reads TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def to_toml(table: Mapping[str, Any]) -> str:
    """Values first, then one [section] per table; tables inside a section are written inline. None has no
    TOML and is left out."""
    top = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    out = "".join(f"{key(k)} = {value(v)}\n" for k, v in top.items() if v is not None)
    for name, section in table.items():
        if isinstance(section, Mapping):
            named = sorted(section.items(), key=lambda item: item[0] != "name")
            rows = "".join(f"{key(k)} = {value(v)}\n" for k, v in named if v is not None)
            out += f"{chr(10) if out else ''}[{key(name)}]\n{rows}"
    return out


def key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else text(name)


def text(given: str) -> str:
    return json.dumps(given, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # JSON allows the delete character, TOML does not


def value(given: Any) -> str:
    if isinstance(given, bool):
        return "true" if given else "false"
    if isinstance(given, str):
        return text(given)
    if isinstance(given, Mapping):
        named = sorted(given.items(), key=lambda item: item[0] != "name")  # a part's name first
        inside = ", ".join(f"{key(str(k))} = {value(v)}" for k, v in named if v is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(given, (list, tuple)):
        return "[" + ", ".join(value(v) for v in given if v is not None) + "]"
    return _number(given)


def _number(given: Any) -> str:
    if isinstance(given, float):
        return repr(given)  # also TOML, inf and nan among them
    return str(int(given))
