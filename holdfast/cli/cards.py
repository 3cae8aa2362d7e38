"""What `holdfast show` prints about a part or about the config, as plain data."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from holdfast.core.registry import Part
from holdfast.report.toml import to_toml

# Where a part of each kind stands in a config file.
_PLACES: dict[str, Any] = {
    "method": lambda part: {"method": part},
    "model": lambda part: {"model": part},
    "aggregator": lambda part: {"aggregator": part},
    "attack": lambda part: {"attack": part},
    "wrapper": lambda part: {"aggregator": {"name": "mean", "wrap": [part]}},
    "detector": lambda part: {"detectors": [part]},
    "partition": lambda part: {"data": {"partition": part}},
    "source": lambda part: {"data": {"name": part["name"], "options": {k: v for k, v in part.items() if k != "name"}}},
    "loss": lambda part: {"train": {"loss": part}},
}


def example(card: dict[str, Any]) -> str:
    """The part in a config file, with its settings spelt out."""
    part = {"name": card["name"], **{s["name"]: s["default"] for s in card["settings"] if s["default"] is not None}}
    return to_toml(_PLACES[card["kind"]](part)).rstrip()


def settings_of(model: Any, prefix: str = "") -> list[dict[str, Any]]:
    """The settings of a part or a section, their types in a reader's words; a table inside a section is spelt with dots."""
    out: list[dict[str, Any]] = []
    for name, field in model.model_fields.items():
        if _nested(field.annotation):
            out += settings_of(field.annotation, f"{prefix}{name}.")
        else:
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            about = {"type": type_words(field.annotation), "help": field.description or ""}
            out.append({"name": prefix + name, "default": default, "required": field.is_required(), **about})
    return out


def type_words(kind: Any) -> str:
    """Literal['a', 'b'] | None -> a | b | none."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(str(word) for word in inside)
    if origin is Annotated:
        return type_words(inside[0])
    if origin in (Union, UnionType):
        return " | ".join(type_words(one) for one in inside)
    if origin in (tuple, list):
        return f"list of {type_words(inside[0])}"
    if origin is dict or kind is dict:
        return "table"
    if kind is Any or (isinstance(kind, type) and issubclass(kind, Part)):
        return "part"
    return "none" if kind is NoneType else getattr(kind, "__name__", str(kind))


def fields_of() -> dict[str, list[dict[str, Any]]]:
    """Every section of a config with its settings; those outside any section stand under an empty name."""
    from holdfast.config import Config

    nested = {name: field.annotation for name, field in Config.model_fields.items() if _nested(field.annotation)}
    top = [card for card in settings_of(Config) if "." not in card["name"]]
    return {"": top, **{name: settings_of(section) for name, section in nested.items()}}


def _nested(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, Part)
