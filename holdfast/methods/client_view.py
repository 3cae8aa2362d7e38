"""A method as its client half sees it.

The clients of several experiments are trained as one stack, by the client half of the first of them. So it
may read of its method only what is equal in all of them; the real-valued settings, in which they may differ,
are in `local.settings`, one value per client."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from holdfast.core.errors import SettingError
from holdfast.local.per_client import where

if TYPE_CHECKING:
    from holdfast.methods.base import Method


class ClientView:
    """Has the attributes of a method, but for settings that may differ between experiments of one stack:
    reading one raises an error that names what to read instead. Methods and properties of the class work on
    the view too, so none of them leads around it."""

    def __init__(self, method: Method):
        object.__setattr__(self, "_method", method)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # so that isinstance(self.method, MyMethod) holds in a client half
        return type(object.__getattribute__(self, "_method"))

    def __getattr__(self, name: str) -> Any:
        method: Method = object.__getattribute__(self, "_method")
        kind = type(method)
        if name in kind.model_fields:
            if name in method.static_settings():
                return getattr(method, name)
            raise SettingError(_refusal(method, name))
        if name in (method.__pydantic_private__ or {}):  # experiments that differ in it are trained apart
            return getattr(method, name)
        if hasattr(BaseModel, name) and not name.startswith("__"):
            raise SettingError(
                f"{where()}: a client half must read its method's settings one by one, by their names,"
                f" not by '{name}'"
            )
        found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        if found is None:
            raise AttributeError(f"{kind.__name__} has no attribute '{name}'")
        if isinstance(found, cached_property):
            return found.func(self)
        return found.__get__(self, kind) if hasattr(found, "__get__") else found

    def __setattr__(self, name: str, value: Any) -> None:
        raise SettingError(f"{where()}: a method's settings are fixed; '{name}' cannot be set")

    def __eq__(self, other: object) -> bool:
        return type(other) is ClientView and self.stands_for() == other.stands_for()

    def __hash__(self) -> int:
        return hash(self.__class__)

    def __repr__(self) -> str:
        kind, *settings = self.stands_for()
        return (
            f"{kind.__name__}({', '.join(f'{name}={value!r}' for name, value in settings)}) as its client"
            " half sees it"
        )

    def stands_for(self) -> tuple[Any, ...]:
        """All that can be read from it: two views that are equal in this are the same for a program made from
        a loss."""
        method = object.__getattribute__(self, "_method")
        return type(method), *sorted(
            {**method.static_settings(), **(method.__pydantic_private__ or {})}.items()
        )

    def __reduce__(self) -> Any:
        return ClientView, (object.__getattribute__(self, "_method"),)


def _refusal(method: Method, name: str) -> str:
    if name in method.row_settings():
        return (
            f"{where()}: self.method.{name} cannot be read in a client half, because experiments that differ"
            f" in it are trained together; read local.settings.{name}, one value per client, or declare it"
            " with setting(..., static=True) to train them apart"
        )
    return (
        f"{where()}: self.method.{name} is declared as the server's (server=True) and cannot be read in a"
        " client half"
    )
