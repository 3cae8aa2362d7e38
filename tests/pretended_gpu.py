"""A device that exists on every machine: its tensors hold ordinary memory, but are apart from the host's as
those of a GPU are. An operation that mixes host and device is refused where CUDA refuses it, and what crosses
to the host is counted. So tests without a GPU show that a round keeps its vectors on the device.

    with pretended_gpu() as gpu:
        x = torch.ones(3, device=gpu.device)
        x + torch.ones(3)        # RuntimeError: tensors on the host and on the device
        float(x.sum())           # counts in gpu.reads, gpu.bytes_to_host

Autograd does not run on it: PyTorch would start a thread for the device, and no test of this process could
fork workers any more. So clients are trained on the host, within `gpu.not_counted()`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"


@dataclass
class PretendedGpu:
    """What happened on the device."""

    device: torch.device
    started: Counter[str] = field(default_factory=Counter)
    """Operations on the device, by name: each would start a kernel or two. Views are not counted."""
    reads: int = 0
    """How often the host waited for numbers of the device."""
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    largest_read: int = 0
    _of_thread: threading.local = field(default_factory=threading.local)

    @property
    def counting(self) -> bool:
        return getattr(self._of_thread, "counting", True)

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """What this thread does in here does not count."""
        before, self._of_thread.counting = self.counting, False
        try:
            yield
        finally:
            self._of_thread.counting = before

    def read(self, size: int) -> None:
        if self.counting:
            self.reads += 1
            self.bytes_to_host += size
            self.largest_read = max(self.largest_read, size)


_now: PretendedGpu | None = None


class OnDevice(Tensor):
    """A tensor of the device. `held` is what it holds, which only the device may touch."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held})"

    def tolist(self) -> Any:
        _count_read(self.held)
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a tensor of the device is not memory of the host: use .cpu() first")

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, given: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        return _perform(function, given, dict(named or {}))


def _perform(function: Any, given: Sequence[Any], named: dict[str, Any]) -> Any:
    name = function.overloadpacket.__name__
    special = _SPECIAL.get(name)
    if special is not None:
        return special(function, given, named)
    _refuse_mixed(name, given, named)
    if "device" in named:
        asked = named["device"]
        named["device"] = torch.device("cpu")
        stays = asked is None or torch.device(asked).type == NAME
    else:
        stays = True
    held = function(*_held(given), **_held(named))
    if _now is not None and _now.counting and not function.is_view:
        _now.started[name] += 1
        if name in _SIZED_BY_DATA or (name in _TAKES_HOST_INDICES and _has_mask(given[1])):
            _now.read(8)  # the host has to know how many there are
    return _wrapped(held, given, named) if stays else held


def _held(tree: Any) -> Any:
    return tree_map_only(OnDevice, lambda tensor: tensor.held, tree)


def _wrapped(result: Any, *inputs: Any) -> Any:
    """Results as tensors of the device; one that was changed in place stays the object that it was."""
    known = {id(tensor.held): tensor for tensor in tree_iter(inputs) if isinstance(tensor, OnDevice)}
    return tree_map_only(
        Tensor, lambda tensor: known[id(tensor)] if id(tensor) in known else OnDevice(tensor), result
    )


_TAKES_HOST_INDICES = {"index", "index_put_", "index_put", "_unsafe_index", "_index_put_impl_"}
_SIZED_BY_DATA = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, OnDevice) and index.dtype == torch.bool for index in tree_iter(indices))


def _refuse_mixed(name: str, *trees: Any) -> None:
    """As CUDA does: a host tensor among device tensors is an error, unless it is one number or an index."""
    if name in _TAKES_HOST_INDICES:
        trees = ([trees[0][0], *trees[0][2:]], trees[1])  # without the indices
    for tensor in tree_iter(trees):
        if isinstance(tensor, Tensor) and not isinstance(tensor, OnDevice) and tensor.ndim:
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found host and device;"
                f" the host has {tuple(tensor.shape)} {tensor.dtype}"
            )


def _count_read(tensor: Tensor) -> None:
    if _now is not None:
        _now.read(tensor.numel() * tensor.element_size())


def _count_written(tensor: Tensor) -> None:
    if _now is not None and _now.counting:
        _now.bytes_to_device += tensor.numel() * tensor.element_size()


def _to_copy(function: Any, given: Sequence[Any], named: dict[str, Any]) -> Any:
    source, asked = given[0], named.pop("device", None)
    named.pop("pin_memory", None)
    named.pop("non_blocking", None)
    leaves = asked is not None and torch.device(asked).type == "cpu"
    if isinstance(source, OnDevice):
        if leaves:
            _count_read(source.held)
        copy = function(source.held, **named)
        return copy if leaves else OnDevice(copy)
    _count_written(source)
    return OnDevice(function(source, **named))


def _copy_in_place(function: Any, given: Sequence[Any], named: dict[str, Any]) -> Any:
    into, source = given[0], given[1]
    if isinstance(source, OnDevice) and not isinstance(into, OnDevice):
        _count_read(source.held)
    elif isinstance(into, OnDevice) and not isinstance(source, OnDevice):
        _count_written(source)
    function(*_held(given), **named)
    return into


def _read_number(function: Any, given: Sequence[Any], named: dict[str, Any]) -> Any:
    _count_read(given[0].held)
    return function(*_held(given), **named)


_SPECIAL = {
    "_to_copy": _to_copy,
    "copy_": _copy_in_place,
    "_local_scalar_dense": _read_number,
    "equal": _read_number,
}


def _new(*shape: Any, **named: Any) -> Tensor:
    for name in ("device", "layout", "pin_memory", "memory_format"):
        named.pop(name, None)
    return OnDevice(torch.empty(*shape, **named))


def _new_strided(shape: Any, stride: Any, **named: Any) -> Tensor:
    return OnDevice(torch.empty_strided(shape, stride, dtype=named.get("dtype")))


def _copy_from(source: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
    """What `torch.tensor(..., device=...)` ends in."""
    return _copy_in_place(torch.ops.aten.copy_.default, (into, source), {})  # type: ignore[no-any-return]


def _registered() -> torch.library.Library:
    """Make the device known to PyTorch; once in a process. Autograd starts its threads at its first use:
    that has to be before, so that there is none for this device."""
    torch.ones(1, requires_grad=True).sum().backward()
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _new, "PrivateUse1")
    library.impl("empty_strided", _new_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    # with a kernel of its own it reaches the class whole; in parts it would change a shape in place, which
    # an object of the class cannot show
    library.impl("matmul", torch.matmul, "PrivateUse1")
    return library


_library: torch.library.Library | None = None


@contextmanager
def pretended_gpu() -> Iterator[PretendedGpu]:
    """Within this context, what happens on the device is counted."""
    global _library, _now
    if _library is None:
        _library = _registered()
    before, _now = _now, PretendedGpu(torch.device(NAME, 0))
    try:
        yield _now
    finally:
        _now = before
