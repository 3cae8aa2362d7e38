"""Numbers in which the experiments of a stack differ: one value per client.

Clients of several experiments are trained as one stack, so a setting such as `lam` is a tensor [n]. Where all
clients of a stack agree, it is an ordinary tensor. Where they differ it is a `PerClient`, with which one can
compute as long as each result keeps a row for each client. Taking one entry, or a mean, or the numbers
themselves (`tolist`) could give every experiment the value of another one, without any sign of an error. That
raises `TrainedApart`, and the experiments are then trained one by one, where all clients agree."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import RunError

_TORCH = str(Path(torch.__file__).parent)
_GUARDS = {__name__, "holdfast.methods.client_view", "holdfast.methods.base", "holdfast.core.registry"}
# these reveal nothing about the numbers themselves
_ABOUT = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "storage_offset",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_contiguous",
    "is_pinned",
    "is_shared",
    "get_device",
    "type",
    "data_ptr",
    "__len__",
    "__hash__",
    "__repr__",
    "__format__",
}
_training = threading.local()


class TrainedApart(RunError):
    """A number in which the experiments of a stack differ was read as one for all: they are to be trained one
    by one."""


class PerClient(Tensor):
    """One row per client, not all equal. What is computed from it has one too, or `TrainedApart` is
    raised."""

    what: str
    clients: int

    @classmethod
    def of(cls, values: Tensor, what: str, clients: int | None = None) -> PerClient:
        """`what` is its name in errors: "settings.lam"."""
        named = plain(values).as_subclass(cls)
        named.what, named.clients = what, len(values) if clients is None else clients
        return named

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = list(_tensors((args, kwargs or {})))
        first = next((tensor for tensor in tensors if isinstance(tensor, PerClient)), None)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if first is None:
            return out
        if getattr(
            _training, "on", False
        ):  # a loss that closes over it would meet samples in place of clients
            raise first.apart()
        alone = all(isinstance(tensor, PerClient) or tensor.numel() == 1 for tensor in tensors)
        return first._kept(out, alone, getattr(func, "__name__", ""))

    def _kept(self, out: Any, alone: bool, name: str) -> Any:
        if isinstance(out, Tensor):
            if not out.ndim or not len(out) or len(out) % self.clients:
                raise self.apart()
            return PerClient.of(out, self.what, self.clients) if alone or out.ndim == 1 else out
        if isinstance(out, (tuple, list)) and out and all(isinstance(one, Tensor) for one in out):
            return type(out)([self._kept(one, alone, name) for one in out])
        if (
            out is None or name in _ABOUT or name == "__get__"
        ):  # the last is how a tensor's properties are read
            return out
        raise self.apart()

    def apart(self) -> TrainedApart:
        return TrainedApart(
            f"{where()}: local.{self.what} is read as one value for all clients, so experiments that differ"
            " in it are trained one by one; to train them together, compute with the whole tensor (x[:,"
            " None] multiplies models [n, size]), and hand it to a loss by aux"
        )

    def __deepcopy__(self, memo: Any) -> PerClient:
        return PerClient.of(plain(self).clone(), self.what, self.clients)


def plain(value: Any) -> Any:
    """The same numbers as an ordinary tensor; other values as they are. For code that keeps clients apart
    itself."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor) if isinstance(value, PerClient) else value


def handed(
    owner: str, numbers: Mapping[str, Tensor | None], put: Callable[[Tensor], Tensor] = lambda value: value
) -> dict[str, Any]:
    """Numbers on the host as a client half reads them, each under its name and where `put` brings it."""
    out: dict[str, Any] = {}
    for name, values in numbers.items():
        differ = values is not None and len(values) > 1 and bool((values != values[0]).any())
        there = None if values is None else put(values)
        out[name] = PerClient.of(there, f"{owner}.{name}") if differ and there is not None else there
    return out


def rows_of_number(values: Tensor, rows: Tensor) -> Tensor:
    """The same number for fewer clients; `rows` is a mask."""
    fewer = plain(values)[rows]
    return PerClient.of(fewer, values.what) if isinstance(values, PerClient) and len(fewer) > 1 else fewer


@contextmanager
def training() -> Iterator[None]:
    """Around training steps, in which a batch has samples where these numbers have clients."""
    before = getattr(_training, "on", False)
    _training.on = True
    try:
        yield
    finally:
        _training.on = before


class Settings(SimpleNamespace):
    """The method's real-valued settings, each a tensor [n]."""

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(sorted(vars(self))) or "none"
        raise AttributeError(
            f"local.settings has no '{name}'; it has the real-valued settings of the method ({known}), and"
            " the others are in self.method"
        )


def where() -> str:
    """File and line of the code that asked: the innermost frame that is neither this package's guard nor
    PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__") in _GUARDS or frame.f_code.co_filename.startswith(_TORCH)
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _tensors(one)
    elif isinstance(given, dict):
        yield from _tensors(list(given.values()))
