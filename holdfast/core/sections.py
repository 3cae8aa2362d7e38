"""Sections of a config: models in the fields of a model."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def section_in(field: FieldInfo | None) -> type[BaseModel] | None:
    """Return the model that a field holds, also where it may be left out: Section, or Section | None."""
    kind = field.annotation if field else None
    if get_origin(kind) in (Union, UnionType):
        kinds = [one for one in get_args(kind) if one is not NoneType]
        kind = kinds[0] if len(kinds) == 1 else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def elsewhere(key: str, config: type[BaseModel]) -> str:
    """Return "; did you mean 'train.rounds'?" where other sections have a setting of this name, else an
    empty text."""
    found = list(_places(key, config, ""))
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def _places(key: str, config: type[BaseModel], path: str) -> Iterator[str]:
    for name, field in config.model_fields.items():
        if name == key:
            yield f"{path}{name}"
        if (inner := section_in(field)) is not None:
            yield from _places(key, inner, f"{path}{name}.")
