"""Compile traced steps, and find compiled code again: in the next start, or made ahead by another process.

A step is handed to PyTorch's compiler as a list of operations on tensors. PyTorch keeps compiled code on
disk, under a key made of the operations, the shapes, the device, its version and its settings, so what is
found is never stale: a step that differs in anything has another key. `torch.compile` would trace the
operations once more, and it needs tensors; here shapes are enough, so a process that compiles ahead holds no
memory of the GPU.

PyTorch reads its files by pickle. They are therefore in a folder that only the user may open."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.core.device import Precision
from holdfast.core.version import __version__
from holdfast.data.cache import cache_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_log = logging.getLogger("holdfast.local")
_BY_STOPWATCH = ("shape_padding", "dynamic_scale_rblock", "benchmark_fusion")
_WRONG = ("triton.mix_order_reduction",)
"""Ways to compile that are wrong for some steps: with this one, in PyTorch 2.11, a step with BatchNorm had
wrong gradients on an H200, and another was not compiled (`benchmarks/equal_plans.py cuda cnn-bn`)."""
_ours: str | None = None
"""The folder that this module has chosen; one that the user names in the environment is left as it is."""

being_compiled: dict[str, threading.Event] = {}
"""By their digests, the steps that other processes compile now. An event is set when one is done, has failed
or has taken too long."""
Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Sizes, strides, type and device of a tensor."""


@dataclass(frozen=True, eq=False)
class Operations:
    """A step as operations on a list of tensors. It holds no tensor, so it can be sent to another process."""

    packed: bytes
    """The pickled graph: every process compiles what it reads from this, which has the same key in all."""
    text: str
    inputs: tuple[Shape, ...]

    @cached_property
    def digest(self) -> str:
        """Equal for the same operations on the same shapes, in every process."""
        return hashlib.sha256(f"{self.inputs}\n{self.text}".encode()).hexdigest()

    def compiled(self) -> Callable[..., Any]:
        """Compile, or load what was compiled before."""
        from torch._guards import TracingContext, tracing
        from torch._inductor import compile
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # registers operations that the graph may hold, which a process that only compiles has not traced
        from holdfast.models.stacked_convolution import operations as _  # noqa: F401

        shapes = FakeTensorMode(shape_env=ShapeEnv())
        with shapes:
            like: list[Any] = [
                torch.empty_strided(*about[:2], dtype=about[2], device=about[3]) for about in self.inputs
            ]
        with tracing(TracingContext(shapes)), torch.no_grad():
            return compile(pickle.loads(self.packed), like, options=_options() | {"fx_graph_cache": True})


@dataclass(frozen=True, eq=False)
class Traced:
    """What make_fx has traced, and the same as operations on a list of tensors."""

    module: torch.fx.GraphModule
    operations: Operations | None
    """None where it cannot be written as such a list."""
    constants: tuple[Tensor, ...] = ()
    """Tensors that the step reads beside its arguments, such as the samples."""

    @classmethod
    def of(cls, module: torch.fx.GraphModule) -> Traced:
        try:
            return cls(module, *_alone(module))
        except Exception as error:  # for example, an operation that cannot be sent
            _log.debug("a step has no form without its tensors: %s: %s", type(error).__name__, error)
            return cls(module, None)


def _alone(module: torch.fx.GraphModule) -> tuple[Operations, tuple[Tensor, ...]]:
    """The operations without tensors: those that they hold become inputs."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    first = next(node for node in graph.nodes if node.op != "placeholder")
    taken = [_shape(node.meta.get("val")) for node in graph.nodes if node.op == "placeholder"]
    held: dict[str, tuple[torch.fx.Node, Tensor]] = {}
    for node in list(graph.nodes):
        node.meta.clear()
        if node.op == "get_attr":
            if node.target not in held:
                with graph.inserting_before(first):
                    place = graph.placeholder(f"constant_{len(held)}")
                held[node.target] = place, getattr(module, node.target)
            node.replace_all_uses_with(held[node.target][0])
            graph.erase_node(node)
    constants = tuple(tensor for _, tensor in held.values())
    alone = torch.fx.GraphModule({}, graph)
    return Operations(pickle.dumps(alone), alone.code, (*taken, *map(_shape, constants))), constants


def compiled(traced: Traced, device: torch.device, precision: Precision) -> Callable[..., Any]:
    """Compile a step, or find the code that was compiled for it before; a process that compiles it now is
    waited for."""
    use_cache()
    graph, operations, constants = traced.module.graph, traced.operations, traced.constants
    if operations is not None:
        with suppress(KeyError):
            being_compiled.pop(operations.digest).wait()
        try:
            run = operations.compiled()
        except Exception as error:  # for example, because another version of PyTorch has other functions
            _log.debug("a step is compiled by torch.compile: %s: %s", type(error).__name__, error)
        else:
            remember(operations, device, precision)
            return lambda *given: graph.process_outputs(run(*graph.process_inputs(*given), *constants))
    return torch.compile(traced.module, dynamic=False, options=_options())


def _options() -> dict[str, Any]:
    """Without the choices that a compiler makes by timing: they could change the order of sums, and so the
    bits, from one run to the next. And without those that are wrong."""
    import torch._inductor.config as settings

    known = settings.get_config_copy()
    return {name: False for name in (*_BY_STOPWATCH, *_WRONG) if name in known}


def _shape(value: Any) -> Shape:
    if not isinstance(value, Tensor):
        raise TypeError(f"an input of the step is a {type(value).__name__}, not a tensor")
    return tuple(value.shape), tuple(value.stride()), value.dtype, value.device


def use_cache() -> Path | None:
    """Have PyTorch keep compiled code beside Holdfast's other caches, where it outlives a restart. None where
    the user has named another folder, or where others could write into this one: then it is where PyTorch
    puts it."""
    global _ours
    named = os.environ.get(VARIABLE)
    if named not in (None, _ours) and named != _usual():
        return None
    folder = _private_folder()
    if folder is None:
        if _ours is not None and os.environ.get(VARIABLE) == _ours:
            del os.environ[VARIABLE]
        _ours = None
        return None
    _ours = os.environ[VARIABLE] = str(folder)
    return folder


def _usual() -> str | None:
    """PyTorch's own choice, which it writes into the environment when it is first asked."""
    with suppress(ImportError):
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        return os.path.abspath(default_cache_dir())
    return None


def _private_folder() -> Path | None:
    """The folder, made where it is missing. What lies in it is run as code: nobody else may write there."""
    base = cache_folder()
    if base is None:
        return None
    folder = base.absolute() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = folder.lstat()
    except OSError:
        return None
    mine = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
    return folder if mine and os.access(folder, os.W_OK | os.X_OK) else None


@contextmanager
def compiling_anew() -> Iterator[None]:
    """Compile everything again, and forget the code that was kept if that helps: it was damaged. Where this
    fails too, the code was not the reason, and it is kept."""
    from torch._inductor.utils import clear_caches

    folder, before = use_cache(), os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory(prefix="holdfast-compiled-", ignore_cleanup_errors=True) as aside:
        os.environ[VARIABLE] = aside
        torch.compiler.reset()
        clear_caches()
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(VARIABLE, None)
            else:
                os.environ[VARIABLE] = before
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        use_cache()
    _log.warning("compiled code of an earlier run was damaged; it is made again")


def has_code() -> bool:
    """Whether code of this or an earlier run is kept."""
    folder = use_cache()
    return folder is not None and any(folder.iterdir())


def machine(device: torch.device) -> dict[str, Any]:
    """What compiled code, and how fast it is, depends on besides the work itself."""
    about: dict[str, Any] = {
        "holdfast": __version__,
        "torch": torch.__version__,
        "device": device.type,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        about |= {
            "cuda": torch.version.cuda,
            "name": gpu.name,
            "memory": gpu.total_memory,
            "capability": f"{gpu.major}.{gpu.minor}",
        }
    return about


def is_known(operations: Operations, device: torch.device, precision: Precision) -> bool:
    """Whether this step was compiled on this machine before, as far as the folder says."""
    note = _note(operations, device, precision)
    return note is not None and note.is_file()


def remember(operations: Operations, device: torch.device, precision: Precision) -> None:
    note = _note(operations, device, precision)
    if note is not None:
        with suppress(OSError):
            note.parent.mkdir(exist_ok=True)
            note.touch()


def _note(operations: Operations, device: torch.device, precision: Precision) -> Path | None:
    folder = use_cache()
    if folder is None:
        return None
    about = f"{operations.digest} {sorted(machine(device).items())} {precision}"
    return folder / "holdfast" / hashlib.sha256(about.encode()).hexdigest()
