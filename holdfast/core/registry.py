"""The registry of all parts that can be chosen by name, with their settings and papers.

A part is a frozen pydantic model whose fields are its settings, so the same class is a config section, its
documentation on the command line and the object that does the work:

    @register("aggregator", "mean")
    class Mean(Part):
        '''The weighted average.'''
        floor: float = setting(0.0, "smallest weight", ge=0)

Plug-ins register the same way, from a file named by --plugin or from an entry point of the group
`holdfast.plugins`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from holdfast.core.errors import ConfigError, UnknownPart, in_print, suggest
from holdfast.core.recorded_table import RecordedTable
from holdfast.core.sections import elsewhere, section_in

_LONG = 250  # letters: a longer list of names does not help in an error
KINDS = (
    "method",
    "aggregator",
    "wrapper",
    "detector",
    "server",
    "attack",
    "trigger",
    "partition",
    "source",
    "model",
    "loss",
    "optimizer",
    "schedule",
)

# Where the built-in parts of a kind live: imported when the kind is first asked for, so `import holdfast`
# stays quick.
_HOMES = {
    "method": "holdfast.methods",
    "aggregator": "holdfast.aggregators",
    "wrapper": "holdfast.wrappers",
    "detector": "holdfast.detectors",
    "server": "holdfast.server_optimizers",
    "attack": "holdfast.attacks",
    "trigger": "holdfast.attacks.triggers",
    "partition": "holdfast.data.partitions",
    "source": "holdfast.data.sources",
    "model": "holdfast.models",
    "loss": "holdfast.local.losses",
    "optimizer": "holdfast.local.optimizers",
    "schedule": "holdfast.local.schedules",
}
_PARTS: dict[str, dict[str, type[Part]]] = {kind: {} for kind in KINDS}
_entry_points_loaded = False
PLUGIN = "holdfast_plugin_"
INVALID = (ValidationError, UnicodeEncodeError)
"""What pydantic raises where values do not fit; the second where the message would repeat half a surrogate
pair, which JSON can hold."""
_PLUGIN_BYTES = 1 << 24  # largest plug-in file
"""Prefix of the names of plug-in modules."""


class Part(BaseModel):
    """One configured part. Subclasses declare settings as fields; the docstring's first line describes the
    part.

    >>> class Halves(holdfast.Part):
    ...     '''Halves what it is given.'''
    ...     times: int = holdfast.setting(1, "how often", ge=1)
    >>> Halves(times=2).settings()
    {'times': 2}
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    kind: ClassVar[str] = ""
    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    """What a named `variant` sets: a setting that is given wins, the others take these values instead of
    their defaults."""
    search: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Values worth trying, by setting: what `holdfast tune` draws from for a method. From its paper, where it
    names them."""
    in_docs: ClassVar[Mapping[str, str]] = {}
    """Its row in the table of its kind in the documentation, by column."""
    tables: ClassVar[Mapping[str, RecordedTable]] = {}
    """The tables that it records in every round, by name: what they mean and how they are drawn."""
    on_device: ClassVar[bool | None] = None
    """Whether it takes updates and models on a GPU, beside ids and counts on the host. By default the parts
    of Holdfast do, and all others are handed tensors of the host."""

    def works_on_device(self) -> bool:
        """Whether it is handed tensors on the device on which servers compute. A class that changes a part of
        Holdfast has to say so itself."""
        said = type(self).__dict__.get("on_device")
        return type(self).__module__.startswith("holdfast.") if said is None else bool(said)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = cls.current(given)
        return {**cls.presets.get(str(given.get("variant")), {}), **given}

    @classmethod
    def current(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Settings as this version spells them: version 0.1 called the variant "paper" "card"."""
        field = cls.model_fields.get("variant")
        names = get_args(field.annotation) if field else ()
        old = given.get("variant") == "card" and "card" not in names and "paper" in names
        return {**given, "variant": "paper"} if old else dict(given)

    def settings(self) -> dict[str, Any]:
        return {field: getattr(self, field) for field in self.__class__.model_fields}  # also for a ClientView


P = TypeVar("P", bound=type[Part])


def setting(default: Any, help: str, *, static: bool = False, server: bool = False, **bounds: Any) -> Any:
    """A documented setting; bounds are pydantic's (ge, gt, le, lt).

    >>> class Mine(holdfast.Part):
    ...     lam: float = holdfast.setting(0.1, "weight of the proximal term", ge=0)
    >>> Mine().lam
    0.1

    Two flags are for methods. `static`: a real number that its client half reads as one number, because it
    decides a shape, what travels or how often a loop runs; experiments that differ in it are trained apart.
    `server`: only the server half reads it; experiments that differ in it are trained together, and the
    client half is refused it."""
    flags: dict[str, Any] = {"static": static, "server": server}
    return Field(default, description=help, json_schema_extra=flags, **bounds)


def declared(field: FieldInfo, word: str) -> bool:
    """Whether a setting was declared `static` or `server`."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get(word))


def register(kind: str, name: str, paper: str = "") -> Callable[[P], P]:
    """Register a part under a name, so that configs can name it. Registering another class under a taken name
    is an error, the same file twice is not.

    >>> from holdfast.aggregators.median import Median
    >>> @holdfast.register("aggregator", "my-median")
    ... class MyMedian(Median):
    ...     '''The median, under my name.'''
    """

    def add(cls: P) -> P:
        if kind not in _PARTS:
            raise ConfigError(f"unknown kind of part '{kind}'{suggest(kind, KINDS)}")
        known = _PARTS[kind].get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(f"{kind} '{name}' is registered already, by {known.__module__}")
        cls.kind, cls.name = kind, name
        if paper:
            cls.paper = paper
        _PARTS[kind][name] = cls
        return cls

    return add


def parts(kind: str) -> dict[str, type[Part]]:
    """All parts of a kind by name, sorted; loads the built-in ones and installed plug-ins on first use."""
    if kind not in _PARTS:
        raise ConfigError(f"unknown kind of part '{kind}'{suggest(kind, KINDS)}")
    _load_built_in(_HOMES[kind])
    _load_entry_points()
    return dict(sorted(_PARTS[kind].items()))


@cache
def _load_built_in(home: str) -> None:
    """Import a package of parts with all its modules: a part is found because its file is there."""
    package = importlib.import_module(home)
    for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
        importlib.import_module(f"{home}.{module.name}")


def find(kind: str, name: str) -> type[Part]:
    known = parts(kind)
    if name not in known:
        said = suggest(name, known)
        if len(said) > _LONG:
            said = f"; `holdfast list {kind}` shows all {len(known)}"
        raise UnknownPart(f"unknown {kind} '{name}'{said}")
    return known[name]


def current(kind: str, chosen: Any) -> Any:
    """A part as a config names it, with its settings as this version spells them."""
    if not isinstance(chosen, Mapping) or "variant" not in chosen:
        return chosen
    cls = parts(kind).get(str(chosen.get("name")))
    return chosen if cls is None else cls.current(chosen)


def build(kind: str, chosen: Any, where: str = "") -> Any:
    """A part from a name, a table with `name`, or a part itself; errors name the config path."""
    where = where or kind
    if isinstance(chosen, Part):
        if chosen.kind not in ("", kind):
            raise ConfigError(f"{where}: '{chosen.name}' is of kind {chosen.kind}, expected {kind}")
        return chosen
    if not isinstance(chosen, (str, Mapping)):
        shown = repr(chosen).splitlines()[0][:60]
        raise ConfigError(
            f"{where}: give the {kind} by name, by a table with a name, or as an object, not {shown}"
        )
    table = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(
            f'{where}: needs a name, for example {where}.name = "{next(iter(parts(kind)), "...")}"'
        )
    cls = find(kind, name)
    try:
        return cls(**table)
    except INVALID as error:
        raise ConfigError(explain(error, cls, where)) from None


def explain(error: ValidationError | UnicodeEncodeError, cls: type[BaseModel], where: str) -> str:
    """Return pydantic's first error as one line with the full path, and the nearest known key when one was
    misspelt."""
    if isinstance(error, UnicodeEncodeError):
        return f"{where or 'config'}: holds text that is not Unicode"
    first = error.errors()[0]
    steps, field = _plain_steps(cls, first["loc"])
    path = ".".join(str(step) for step in (where, *steps) if str(step))
    if first["type"] == "extra_forbidden":
        owner = _owner(cls, first["loc"][:-1])
        known = list(owner.model_fields) if owner else []
        if owner and issubclass(owner, Part) and not known:
            return f"unknown key '{path}'; {owner.kind} '{owner.name}' has no settings"
        key = str(first["loc"][-1])
        return f"unknown key '{path}'{elsewhere(key, cls) or suggest(key, known)}"
    message = first["msg"].removeprefix("Value error, ")
    given = first.get("input")
    shown = f" (got {given!r})" if isinstance(given, (int, float, str, bool)) else ""
    if (
        len(steps) < len(first["loc"]) and field is not None and field.description
    ):  # no branch of a union fits: describe what does
        return f"{path}: does not fit{shown}; it is {field.description}"
    return f"{path}: {message[0].lower()}{message[1:]}{shown}"


def _plain_steps(cls: type[BaseModel], path: tuple[Any, ...]) -> tuple[tuple[Any, ...], FieldInfo | None]:
    """Return an error's path as a user writes it, and the last field on it, without the branches of a union
    that pydantic adds."""
    at: type[BaseModel] | None = cls
    field: FieldInfo | None = None
    for place, step in enumerate(path):
        if at is None and not isinstance(step, int):
            return path[:place], field
        if at is not None:
            field = at.model_fields.get(str(step))
            at = section_in(field)
    return path, field


def _owner(cls: type[BaseModel], path: tuple[Any, ...]) -> type[BaseModel] | None:
    """Return the nested model that an error is about."""
    for step in path:
        inner = section_in(cls.model_fields.get(str(step)))
        if inner is None:
            return None
        cls = inner
    return cls


def describe(cls: type[Part]) -> dict[str, Any]:
    """What `holdfast list` and `holdfast show` print."""
    text = (cls.__doc__ or "").strip()
    return {
        "name": cls.name,
        "kind": cls.kind,
        "summary": " ".join(text.partition("\n\n")[0].split()),
        "paper": cls.paper,
        "text": text,
        "module": cls.__module__,
        "settings": settings_of(cls),
        "search": {name: list(values) for name, values in cls.search.items()},
    }


def settings_of(model: Any, prefix: str = "") -> list[dict[str, Any]]:
    """The settings of a part or a section, their types in a reader's words; a table inside a section is spelt
    with dots."""
    out: list[dict[str, Any]] = []
    for name, field in model.model_fields.items():
        if is_section(field.annotation):
            out += settings_of(field.annotation, f"{prefix}{name}.")
        else:
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            about = {"type": type_words(field.annotation), "help": field.description or ""}
            out.append({"name": prefix + name, "default": default, "required": field.is_required(), **about})
    return out


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, Part)


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


def load_plugin(file: str | Path) -> None:
    """Run a user's file so that what it registers can be chosen by name, as --plugin does.

    >>> holdfast.load_plugin("mine.py")
    >>> holdfast.run(method="mine")
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"plugin file not found: {file}")
    name = f"{PLUGIN}{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return
    spec = (
        importlib.util.spec_from_file_location(name, path) if path.suffix == ".py" else None
    )  # compiled code can end the process
    if spec is None or spec.loader is None or path.stat().st_size > _PLUGIN_BYTES:
        raise ConfigError(f"plugin is not a Python file: {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        line = next(
            (
                f.lineno
                for f in reversed(traceback.extract_tb(error.__traceback__))
                if f.filename == str(path)
            ),
            None,
        )
        where = f" ({path.name}, line {line})" if line else ""
        raise ConfigError(
            f"plugin {file} failed to load: {type(error).__name__}: {in_print(str(error))[:500]}{where}"
        ) from error


def plugin_of(part: object) -> str | None:
    """The plug-in file that a part comes from, if it comes from one."""
    module = type(part).__module__
    return sys.modules[module].__file__ if module.startswith(PLUGIN) and module in sys.modules else None


def registering_packages() -> set[str]:
    """Packages other than Holdfast that have registered parts: installed plug-ins."""
    return {cls.__module__.partition(".")[0] for known in _PARTS.values() for cls in known.values()} - {
        "holdfast"
    }


def plugin_options(files: Iterable[str | Path]) -> str:
    """What to add to a command that needs these plug-ins."""
    return "".join(f" --plugin {shlex.quote(str(file))}" for file in files)


def _load_entry_points() -> None:
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    for point in importlib.metadata.entry_points(group="holdfast.plugins"):
        point.load()
