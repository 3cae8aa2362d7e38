"""When kernels take the place of matrix products: while the step of a stack is traced for a CUDA device, in
TF32 or bfloat16, for layers in the table of blocks. Everything else, and every machine without Triton, keeps
the products."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from holdfast.core.device import Precision

from .blocks import measured
from .shape import Choice, Mode, Shape

Choose = Callable[[Shape], Choice | None]
"""How kernels compute a layer; None: by a matrix product."""
_log = logging.getLogger("holdfast.models")
_MODES: dict[Precision, Mode] = {"tf32": "tf32", "bf16": "bf16", "bf16-activations": "bf16"}
_LEAST = (8, 0)  # the compute capability that TF32 and bfloat16 need
_SHARED = 99 << 10  # bytes of a multiprocessor's memory that every such device gives to a program
_asked: list[Choose] = []
_given_up: list[bool] = []


class KernelFailed(RuntimeError):
    """A kernel could not be compiled or started."""


def choices_for(device: torch.device, precision: Precision, dtype: torch.dtype) -> Choose | None:
    """Return how to choose for a program; None where all convolutions are matrix products."""
    if _asked:
        return _asked[-1]
    mode = _MODES.get(precision)
    if _given_up or device.type != "cuda" or mode is None or dtype != torch.float32:
        return None
    room, why_not = _room(device)
    if why_not:
        _log.debug("convolutions are matrix products of patches: %s", why_not)
        return None
    return lambda shape: _by_table(shape, mode, room)


@contextmanager
def choosing(choose: Choose) -> Iterator[list[Choice]]:
    """Choose by this function, on every device; yield the choices that were made. For benchmarks and tests:
    `choosing(lambda shape: None)` gives the products."""
    made: list[Choice] = []

    def noting(shape: Shape) -> Choice | None:
        choice = choose(shape)
        if choice is not None:
            made.append(choice)
        return choice

    _asked.append(noting)
    try:
        yield made
    finally:
        _asked.pop()


def give_up(why: KernelFailed) -> None:
    """Use no kernels any more in this process."""
    if not _given_up:
        _given_up.append(True)
        _log.warning("kernels for convolutions failed (%s); convolutions are matrix products of patches", why)


def shape_of(conv: nn.Conv2d, x: Tensor, samples: bool) -> Shape | None:
    """Return the layer's shape for images of one client; None where kernels cannot compute it."""
    (kernel, *kernels), padding = set(conv.kernel_size), conv.padding
    if kernels or isinstance(padding, str) or len(set(padding)) > 1 or conv.padding_mode != "zeros":
        return None
    usual = conv.stride == conv.dilation == (1, 1) and conv.groups == 1
    if not usual or x.ndim != 4 or x.shape[2] != x.shape[3]:
        return None
    return Shape(len(x), conv.in_channels, x.shape[2], conv.out_channels, kernel, padding[0], samples)


def _by_table(shape: Shape, mode: Mode, room: int) -> Choice | None:
    blocks = measured(shape)
    if blocks is None or any(each.shared > room for each in blocks.values()):
        return None
    return Choice(shape, blocks, mode)


@lru_cache
def _room(device: torch.device) -> tuple[int, str]:
    """Return how much memory of a multiprocessor a program can have, and why kernels cannot be used."""
    if find_spec("triton") is None:
        return 0, "Triton is not installed"
    if torch.version.hip is not None:
        return 0, "kernels were not measured on GPUs of AMD"
    about = torch.cuda.get_device_properties(device)
    if (about.major, about.minor) < _LEAST:
        return 0, f"{about.name} has compute capability {about.major}.{about.minor}, kernels need 8.0"
    try:
        import_module(".kernels", __package__)
    except Exception as error:  # for example, a version of Triton that does not fit PyTorch
        return 0, f"{type(error).__name__}: {error}"
    return int(getattr(about, "shared_memory_per_block_optin", _SHARED)), ""
