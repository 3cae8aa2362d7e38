"""Names of Python objects in a config: made from name and settings, never from the address in memory, so that
every process gives an object the same name. Objects with equal names are numbered within their sweep."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from pydantic import BaseModel
from torch import nn

from holdfast.core.registry import Part, parts
from holdfast.data.handed.content import HandedOver
from holdfast.data.handed.data import Data
from holdfast.local.function_identity import identity
from holdfast.models.own_module import Model
from holdfast.wrappers.base import Wrapped

Numbers = Mapping[int, int]
"""By id, the number of each object that shares its name with another one of the sweep."""

_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+", re.IGNORECASE)
_LONGEST = 60  # longest repr of an object that is used


def words(value: Any) -> str:
    """For a label: my_loss, Net(width=7), ditto(lam=0.5)."""
    if isinstance(value, Wrapped):
        rule, around = value.layers()
        return f"{words(rule)},wrap={'+'.join(map(words, around))}"
    if isinstance(value, Model):
        return words(value.source) + "".join(f",{name}={given}" for name, given in _unusual(value).items())
    if isinstance(value, partial):
        given = [
            *map(_said, value.args),
            *(f"{name}={_said(inner)}" for name, inner in value.keywords.items()),
        ]
        return f"{words(value.func)}({','.join(given)})" if given else words(value.func)
    if (own := _own_words(value)) is not None:
        return own
    return _title(value).rpartition(".")[2].replace("<lambda>", "lambda") + _settings(value)


def full_words(value: Any) -> str:
    """For a config on disk, where no name finds the object again: <Model(Net)>,
    <make.<locals>.loss(tau=0.5)>."""
    if isinstance(value, (Model, Wrapped, partial)):
        return f"<{_title(value)}({words(value)})>"
    own = _own_words(value)
    return f"<{_title(value)}{_settings(value) if own is None else f'({own})'}>"


def is_named(part: Part) -> bool:
    """Whether its name finds it again in another process."""
    return bool(part.name and part.kind) and parts(part.kind).get(part.name) is type(part)


def spelt(value: Any, numbers: Numbers) -> str:
    """A value of a sweep as its label has it; what holds no objects is written as Python writes it."""
    return str(_spelt(value, numbers)) if _holds_objects(value) else str(value)


def short(value: Any, numbers: Numbers) -> str:
    """The same, in as few words as tell it from others: `ditto lam=0.5` for a table or a part, `norm+krum`
    for a list."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        name = [short(value["name"], numbers)] if "name" in value else []
        return " ".join([*name, *_pairs({key: value[key] for key in value if key != "name"}, numbers)])
    if isinstance(value, (list, tuple)):
        return "+".join(short(inner, numbers) for inner in value) if value else "none"
    if not _holds_objects(value):
        return str(value)
    number = f"-{numbers[id(value)]}" if id(value) in numbers else ""
    if isinstance(value, Wrapped):
        rule, around = value.layers()
        return f"{short(rule, numbers)}{number} wrap={short(around, numbers)}"
    if isinstance(value, Model):
        return " ".join([words(value.source) + number, *_pairs(_unusual(value), numbers)])
    if isinstance(value, Part):
        return " ".join([_title(value) + number, *_pairs(_given(value), numbers)])
    return words(value) + number


def _pairs(settings: Mapping[str, Any], numbers: Numbers, path: str = "") -> list[str]:
    """lam=0.5, and lies.count=2 for a table in a table."""
    out = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and value and "name" not in value:
            out += _pairs(value, numbers, f"{path}{key}.")
        else:
            out.append(f"{path}{key}={short(value, numbers)}")
    return out


def numbered(values: Iterable[Any]) -> dict[int, int]:
    """Numbers for objects that have the same words, in their order."""
    found: dict[str, dict[int, None]] = {}
    for value in values:
        for each in _objects(value):
            if not (isinstance(each, Part) and is_named(each)):
                found.setdefault(full_words(each), {})[id(each)] = None
    return {
        which: place
        for alike in found.values()
        if len(alike) > 1
        for place, which in enumerate(alike, start=1)
    }


def plain(value: Any, numbers: Numbers) -> Any:
    """As JSON would hold it. A part that a name finds becomes its table, any other object a <word> that says
    what it was."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, HandedOver):
        return value.digest
    if isinstance(value, Wrapped):
        rule, around = (plain(layer, numbers) for layer in value.layers())
        return {**rule, "wrap": around} if isinstance(rule, dict) else rule
    if isinstance(value, Part) and is_named(value):
        return {"name": value.name, **plain(value.settings(), numbers)}
    if isinstance(value, BaseModel) and not isinstance(value, Part):
        return {name: plain(getattr(value, name), numbers) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): plain(inner, numbers) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, numbers) for inner in value]
    word = full_words(value)
    return f"{word[:-1]}-{numbers[id(value)]}>" if id(value) in numbers else word


def agree(was: Any, wanted: Any) -> bool:
    """Whether two plain configs, or values of them, are the same. An older one may have only the kind of an
    object."""
    if isinstance(was, Mapping) and isinstance(wanted, Mapping):
        return was.keys() == wanted.keys() and all(agree(was[key], wanted[key]) for key in was)
    if was == wanted:
        return True
    word = is_word(was) and is_word(wanted)
    return word and "(" not in was and wanted.startswith((was[:-1] + "(", was[:-1] + "-"))


def first_difference(was: Any, wanted: Any, path: str = "") -> str:
    """The dotted key of the first value in which two plain configs do not agree."""
    if isinstance(was, Mapping) and isinstance(wanted, Mapping) and was.get("name") == wanted.get("name"):
        for key in dict.fromkeys([*was, *wanted]):
            inner = f"{path}.{key}" if path else str(key)
            if (key in was) != (key in wanted):
                return inner
            if not agree(was[key], wanted[key]):
                return first_difference(was[key], wanted[key], inner)
    return path


def is_word(value: Any) -> bool:
    """Whether a value of a plain config stands for a Python object."""
    return isinstance(value, str) and value.startswith("<") and value.endswith(">")


def unnamed(table: Any, path: str = "") -> list[str]:
    """Where a plain config holds objects that only the Python program that made them has."""
    if isinstance(table, Mapping):
        return [
            found
            for key, value in table.items()
            for found in unnamed(value, f"{path}.{key}" if path else str(key))
        ]
    if isinstance(table, list):
        return [found for place, value in enumerate(table) for found in unnamed(value, f"{path}.{place}")]
    return [path] if is_word(table) else []


class _Word(str):
    """Text that a list shows without quotes."""

    __repr__ = str.__str__


def _spelt(value: Any, numbers: Numbers) -> Any:
    if isinstance(value, Mapping):
        return {key: _spelt(inner, numbers) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_spelt(inner, numbers) for inner in value)
    if not _holds_objects(value):
        return value
    return _Word(f"{words(value)}-{numbers[id(value)]}" if id(value) in numbers else words(value))


def _holds_objects(value: Any) -> bool:
    return next((True for _ in _objects(value)), False)


def _objects(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _objects(inner)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        yield value


def _title(value: Any) -> str:
    if isinstance(value, Part) and is_named(value):
        return value.name
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _own_words(value: Any) -> str | None:
    """The repr of an object, where it is short and holds no address."""
    if isinstance(value, (Part, nn.Module)) or hasattr(value, "__qualname__"):
        return None
    said = value.title if isinstance(value, Data) else str(value)
    return None if _ADDRESS.search(said) or len(said) > _LONGEST or "\n" in said else said.replace(" ", "")


def _unusual(model: Model) -> dict[str, Any]:
    """What was asked of a model beyond its source."""
    said = {"head": model.head, "weights": model.weights, "weights_head": model.weights_head}
    usual = {"head": "head", "weights": None, "weights_head": "file"}
    return {name: given for name, given in said.items() if given != usual[name]}


def _settings(value: Any) -> str:
    """(lam=0.5); empty where there is nothing to tell."""
    found = _told(value)
    return f"({','.join(f'{name}={_said(given)}' for name, given in found.items())})" if found else ""


def _told(value: Any) -> Mapping[str, Any]:
    """What tells an object from others of its kind, as far as it can be read."""
    if isinstance(value, Part):
        usual = {
            name: field.get_default(call_default_factory=True)
            for name, field in type(value).model_fields.items()
        }
        return {
            name: given
            for name, given in value.settings().items()
            if identity(given) != identity(usual[name])
        }
    if isinstance(value, FunctionType):
        return _simple(_bound(value))
    if isinstance(value, type):
        return {}
    return _simple(
        {
            name: given
            for name, given in getattr(value, "__dict__", {}).items()
            if not name.startswith("_") and name != "training"
        }
    )


def _given(part: Part) -> dict[str, Any]:
    """What was said of a part, as a table in its place would say it: `Ditto(lam=0.1)` is labelled as
    {"name": "ditto", "lam": 0.1} is, also where 0.1 is the default."""
    unusual = _told(part)
    return {
        name: given
        for name, given in part.settings().items()
        if name in unusual or name in part.model_fields_set
    }


def _bound(function: FunctionType) -> dict[str, Any]:
    """What an inner function takes from the outer one: by its closure, or as defaults of its arguments."""
    if "<" not in function.__qualname__:
        return {}
    code, defaults = function.__code__, function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount]
    out: dict[str, Any] = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            out[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return out


def _simple(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: given
        for name, given in found.items()
        if isinstance(given, (bool, int, float, str)) and len(str(given)) <= _LONGEST
    }


def _said(given: Any) -> str:
    return spelt(given, {}).replace(" ", "")
