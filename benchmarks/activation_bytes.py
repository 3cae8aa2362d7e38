"""What a training step keeps and moves: bytes of everything that the traced step makes, the most that is
alive at a time, casts and copies, and what is left of them after fusion.

    python benchmarks/activation_bytes.py                               # all works, compiled plans
    python benchmarks/activation_bytes.py --works resnet18 --fused      # two minutes
    python benchmarks/activation_bytes.py --works cnn-bn cnn-gn cnn-plain --captured --padded
    python benchmarks/activation_bytes.py --works cnn-bn --captured --padded --chain  # BatchNorm as it was
    python benchmarks/activation_bytes.py --works fedcap-cnn --kernels  # convolutions as on a GPU with Triton

Nothing is computed: the step is traced with tensors that have shapes and no numbers, as it is for PyTorch's
compiler, so that no GPU is needed. `made` counts every tensor once, views not; tensors of a parameter's
shape are left out. `alive` is the most bytes that are alive at a time if every tensor is freed after its
last use; the compiler needs less, because operations that it fuses never write down what they hand to each
other. `planned` is what a program of these clients is planned to need, with its own memory, and the number
after it says how much of that it does need; the last two columns are the same for activations alone, without
tensors of a parameter's shape. `--fused` asks the compiler: the bytes that its kernels and library calls read
and write, and the number of its kernels. Its kernels for a GPU are fused by the same rules, but are not the
same."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.memory import (
    assign_memory_planning_info_for_scheduler_buffers,
    assign_memory_planning_info_for_scheduler_nodes,
    estimate_peak_memory,
    get_freeable_input_buf,
)
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._ordered_set import OrderedSet

from holdfast.core.device import Precision
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.data.federation import Padded, Samples
from holdfast.local.batch_order import schedule
from holdfast.local.compiled_code import _options
from holdfast.local.fit import Recipe
from holdfast.local.plan import activations, bytes_per_row
from holdfast.local.program import Program, Structure
from holdfast.local.stack import Stack
from holdfast.models import batched_convolution as convolution
from holdfast.models import network
from holdfast.models.network import Network
from holdfast.models.stacked_convolution.blocks import measured
from holdfast.models.stacked_convolution.shape import Choice, Shape
from holdfast.models.stacked_convolution.use import choosing

_CASTS = (torch.ops.aten._to_copy.default,)
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.copy.default, torch.ops.aten.copy_.default)


@dataclass(frozen=True)
class Traffic:
    """What the operations of a traced step make."""

    made: dict[torch.dtype, int]
    """Bytes of all new tensors by their type, without those of a parameter's shape."""
    alive: int
    """The most bytes of new tensors at a time."""
    casts: int
    copies: int

    @classmethod
    def of(cls, traced: fx.GraphModule, parameters: Collection[tuple[int, ...]] = ()) -> Traffic:
        made: dict[torch.dtype, int] = {}
        casts = copies = 0
        for node, value in _new(traced):
            if tuple(value.shape) not in parameters:
                made[value.dtype] = made.get(value.dtype, 0) + value.untyped_storage().nbytes()
                casts += node.target in _CASTS
                copies += node.target in _COPIES
        return cls(made, peak(traced), casts, copies)


def peak(traced: fx.GraphModule, but: Collection[tuple[int, ...]] = ()) -> int:
    """Return the most bytes that the tensors made by a traced step take at a time, each from the operation
    that makes it to the last one that reads it or a view of it, without those of the shapes `but`."""
    order = {node: place for place, node in enumerate(traced.graph.nodes)}
    until: dict[int, int] = {}
    for node in traced.graph.nodes:
        last = max((order[user] for user in node.users), default=order[node])
        for value in _tensors(node):
            until[_storage(value)] = max(until.get(_storage(value), 0), last)
    begins: dict[int, list[tuple[int, int]]] = {}
    for node, value in _new(traced):
        if tuple(value.shape) not in but:
            begins.setdefault(order[node], []).append((_storage(value), value.untyped_storage().nbytes()))
    alive: dict[int, int] = {}
    most = 0
    for place in range(len(order)):
        alive |= dict(begins.get(place, []))
        most = max(most, sum(alive.values()))
        alive = {storage: size for storage, size in alive.items() if until[storage] > place}
    return most


def held(program: Program) -> int:
    """Return the bytes of a program's own memory: models, targets, optimiser state."""
    return sum(value.untyped_storage().nbytes() for value in program.memory.values())


def _new(traced: fx.GraphModule) -> list[tuple[fx.Node, Tensor]]:
    """Return the tensors with memory of their own, and the operations that make them."""
    seen = {
        _storage(value) for node in traced.graph.nodes if node.op == "placeholder" for value in _tensors(node)
    }
    out = []
    for node in traced.graph.nodes:
        for value in _tensors(node) if node.op == "call_function" else ():
            if _storage(value) not in seen:
                seen.add(_storage(value))
                out.append((node, value))
    return out


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    return [
        each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, Tensor)
    ]


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


@dataclass(frozen=True)
class Work:
    """A model as the benchmark trains it."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    plan: str
    clients: int


def small(norm: Callable[[int], nn.Module]) -> nn.Module:
    """The network of `cnn-bn`, with another layer in the place of BatchNorm."""
    made = build("model", {"name": "cnn-bn"}).build((1, 28, 28), 10)
    for place, layer in enumerate(made.backbone):
        if isinstance(layer, nn.BatchNorm2d):
            made.backbone[place] = norm(layer.num_features)
    return made


def _named(shape: tuple[int, ...], **model: Any) -> Callable[[], nn.Module]:
    return lambda: build("model", model).build(shape, 10)


_GREY, _COLOUR = (1, 28, 28), (3, 32, 32)
WORKS = {
    "resnet18": Work(_named(_COLOUR, name="resnet18"), _COLOUR, 64, "compiled-loop", 1),
    "resnet18-batch": Work(_named(_COLOUR, name="resnet18", norm="batch"), _COLOUR, 64, "compiled-loop", 1),
    "cnn-bn": Work(_named(_GREY, name="cnn-bn"), _GREY, 10, "compiled-vmap", 20),
    "cnn-gn": Work(lambda: small(lambda width: nn.GroupNorm(4, width)), _GREY, 10, "compiled-vmap", 20),
    "cnn-plain": Work(lambda: small(lambda width: nn.Identity()), _GREY, 10, "compiled-vmap", 20),
    "fedcap-cnn": Work(_named(_COLOUR, name="fedcap-cnn"), _COLOUR, 10, "compiled-vmap", 20),
}


def step_of(work: Work, precision: Precision, full: bool = True) -> tuple[Program, Network]:
    """Return the program of a work's step on noise; without `full`, batches are padded."""
    samples = build("source", {"name": "synthetic", "shape": work.shape}).load(None)
    made = Network(work.make, signature=f"{id(work)} {precision}")
    recipe = Recipe(batch_size=work.batch_size)
    return program_of(made, samples, recipe, work.plan, work.clients, precision, full), made


def program_of(
    network: Network,
    samples: Samples,
    recipe: Recipe,
    plan: str,
    clients: int,
    precision: Precision = "fp32",
    full: bool = True,
) -> Program:
    count = recipe.batch_size - (not full)
    rows = torch.arange(clients * count).view(clients, count) % len(samples)
    data = Padded(rows, samples.y[rows], torch.full((clients,), count))
    order = schedule(
        Key(0).fold(torch.arange(clients)), data.count.numpy(), recipe.batch_size, np.ones(clients, int)
    )
    start = network.initial(Key(0)).expand(clients, -1)
    key = Key(0).fold(torch.arange(clients))
    stack = Stack.of(network, start, samples, data, key, recipe, order, None, None, {}, None)
    return Program(Structure.of(stack, 1 if plan.endswith("-loop") else clients, plan, precision), stack)


def traced_as(program: Program) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """Return the step as its plan runs it on a GPU, and its inputs: a captured one as PyTorch runs it, one
    operation after the other, without the forms that layers have for stacks on a CPU."""
    s = program.structure
    inputs = program._inputs_alone() if s.alone else (program.memory,)
    if s.compiled:
        return program.traced(), inputs
    run: Any = program._gradients_alone if s.alone else program._step
    names = [(convolution, "_foldable"), (convolution, "has_own_formula"), (network, "has_own_formula")]
    usual = [getattr(module, name) for module, name in names]
    try:
        for module, name in names:
            setattr(module, name, _never if name == "_foldable" else _as_on_a_gpu)
        return make_fx(lambda *given: run(*given), {}, "fake", _allow_non_fake_inputs=True)(*inputs), inputs
    finally:
        for (module, name), function in zip(names, usual, strict=True):
            setattr(module, name, function)


def _never(*_: Any) -> bool:
    return False


@contextmanager
def chained() -> Iterator[None]:
    """Within this context BatchNorm is a chain of operations, of which autograd keeps the results."""
    layer = network._MaskedBatchNorm
    usual = layer._has_own_formula
    layer._has_own_formula = _never  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        layer._has_own_formula = usual  # type: ignore[method-assign]


def kept(work: Work, step: fx.GraphModule, made: Network) -> int:
    """Return the most bytes of activations at a time: of new tensors that have no parameter's shape."""
    shapes = {tuple(p.shape) for p in made.module.parameters()}
    return peak(step, shapes | {(work.clients, *shape) for shape in shapes})


def kept_as_planned(work: Work, made: Network, sample: Tensor) -> int:
    """Return the bytes of activations that a plan counts with (`bytes_per_row`)."""
    numbers = 3 * work.batch_size * (activations(made.module, sample) + sample.numel()) // 2
    return work.clients * numbers * sample.element_size()


def _as_on_a_gpu(x: Tensor) -> bool:
    return convolution.rounding() or convolution.is_batchedtensor(x)


@dataclass(frozen=True)
class Fused:
    """What is left after PyTorch's compiler has fused operations."""

    bytes: int
    """What its kernels and the calls of libraries read and write."""
    kernels: int
    calls: int
    alive: int
    """The most bytes of new tensors at a time."""


def fused(step: fx.GraphModule, inputs: tuple[Any, ...]) -> Fused:
    """Let PyTorch's compiler plan the step without compiling it."""
    found: list[Fused] = []

    def plan_only(graph: GraphLowering) -> Any:
        graph.codegen()
        nodes = graph.scheduler.nodes
        calls = sum(node.is_extern() for node in nodes)
        kernels = len(nodes) - calls - sum(isinstance(node, NopKernelSchedulerNode) for node in nodes)
        scheduler, outputs = graph.scheduler, OrderedSet(graph.get_output_names())
        inputs = get_freeable_input_buf(nodes, OrderedSet(graph.graph_inputs.keys()))
        assign_memory_planning_info_for_scheduler_buffers(nodes, scheduler.name_to_buf)
        assign_memory_planning_info_for_scheduler_nodes(
            nodes, scheduler.name_to_fused_node, scheduler.name_to_buf, inputs
        )
        alive = estimate_peak_memory(nodes, inputs, outputs)[0]
        found.append(Fused(graph.count_bytes()[0], kernels, calls, alive))
        raise _Planned

    usual = GraphLowering.compile_to_module
    config.cpp.use_two_step_variance_threshold = 0  # mean and variance in one pass, as on a GPU
    GraphLowering.compile_to_module = plan_only  # type: ignore[method-assign, assignment]
    try:
        torch.compile(step, dynamic=False, options=_options())(*inputs)
    except Exception:
        if not found:
            raise
    finally:
        GraphLowering.compile_to_module = usual  # type: ignore[method-assign]
    return found[0]


class _Planned(Exception):
    """The compiler has planned all kernels; nothing more is wanted."""


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--works", nargs="*", default=list(WORKS), choices=list(WORKS))
    options.add_argument("--padded", action="store_true", help="batches are padded")
    options.add_argument("--fused", action="store_true", help="also ask PyTorch's compiler")
    options.add_argument(
        "--captured", action="store_true", help="the captured plan in place of the compiled one"
    )
    options.add_argument(
        "--chain", action="store_true", help="BatchNorm as a chain of operations, as it was before"
    )
    options.add_argument("--kernels", action="store_true", help="convolutions by kernels, as on a GPU")
    asked = options.parse_args()
    print(
        f"{'work':15} {'precision':17} made: {'float32':>8} {'bfloat16':>8} MB casts copies  alive  needed"
        "  planned        activations"
    )
    for work in asked.works:
        for precision in ("tf32" if asked.kernels else "fp32", "bf16", "bf16-activations"):
            kernels = _kernels(precision) if asked.kernels else nullcontext()
            with kernels, chained() if asked.chain else nullcontext():
                print(_line(work, precision, asked), flush=True)


def _kernels(precision: Precision) -> AbstractContextManager[Any]:
    """Trace convolutions as for a GPU with Triton."""

    def choose(shape: Shape) -> Choice | None:
        blocks = measured(shape)
        return None if blocks is None else Choice(shape, blocks, "tf32" if precision == "tf32" else "bf16")

    return choosing(choose)


def _line(name: str, precision: Precision, asked: argparse.Namespace) -> str:
    work = WORKS[name]
    if asked.captured:
        work = replace(work, plan=work.plan.replace("compiled", "captured"))
    program, made = step_of(work, precision, not asked.padded)
    step, inputs = traced_as(program)
    traffic = Traffic.of(step, {tuple(p.shape) for p in made.module.parameters()})
    needed = held(program) + traffic.alive
    sample = program.samples.blank(made.dtype)
    planned = work.clients * bytes_per_row(made, sample, work.batch_size)
    activated = kept(work, step, made)
    wide, half = (traffic.made.get(dtype, 0) / 1e6 for dtype in (torch.float32, torch.bfloat16))
    line = f"{name:15} {precision:17}"
    line += f" {wide:14.0f} {half:8.0f} {traffic.casts:6} {traffic.copies:6}"
    line += f" {traffic.alive / 1e6:7.1f} {needed / 1e6:7.1f} {planned / 1e6:8.1f} {needed / planned:6.2f}"
    line += f" {activated / 1e6:9.1f} {activated / kept_as_planned(work, made, sample):6.2f}"
    if asked.fused:
        after = fused(step, inputs)
        line += f"   fused: {after.bytes / 1e6:.0f} MB by {after.kernels} kernels and {after.calls} calls"
        line += f", alive {after.alive / 1e6:.1f}"
    return line


if __name__ == "__main__":
    main()
