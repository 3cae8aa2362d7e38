"""Whole steps of the package's program, with its convolutions as products and by kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.bench.steps import Bench, Work
from holdfast.core.device import Precision, deterministic_math
from holdfast.local import programs
from holdfast.local.fit import stack_of
from holdfast.local.per_client import training
from holdfast.local.plan import Plan
from holdfast.local.program import Program, Structure
from holdfast.models.stacked_convolution.shape import Mode
from holdfast.models.stacked_convolution.use import choosing

from .setting import Setting
from .timing import compared, distance

if TYPE_CHECKING:
    from ..convolution_kernel import Part


_EXACT = 1e-5  # sums in float32 in another order, where a device rounds no factors
_CUT = 2.5  # factors that are cut off have errors twice as large, root mean square, as rounded ones


def step(part: Part, setting: Setting) -> None:
    """Time a whole step of the package's program in both forms. On a GPU the package itself chooses the
    kernels."""
    part.report.say(
        "  microseconds of one client's step; how far what it adds to the parameters is from a step"
    )
    part.report.say("  by products in fp32: with kernels (error), with products of this precision (usual)")
    for work in setting.works:
        for precision in setting.precisions_of_steps:
            name = f"{work.name} {precision}"
            part.item(name, partial(_step, part, setting, work, precision, name))
            programs.forget()


def _step(part: Part, setting: Setting, work: Work, precision: Precision, name: str) -> None:
    device, on_gpu = torch.device(setting.device), setting.device == "cuda"
    mode: Mode = "tf32" if precision == "tf32" else "bf16"
    kernels: AbstractContextManager[Any] = (
        nullcontext() if on_gpu else choosing(lambda shape: setting.choice(shape, mode))
    )
    with choosing(lambda shape: None):
        exact = in_fp32(work)
        products = program_of(work, precision)
        works = {"products": products.replay if on_gpu else uncompiled(products)}
    with kernels:
        program = program_of(work, precision)
        used = kernels_of(program)
        works["kernels"] = program.replay if on_gpu else uncompiled(program)
    if used != len(setting.shapes):
        raise LookupError(f"the package's step computes {used} of {len(setting.shapes)} layers by kernels")
    for key, value in program.memory.items():
        products.memory[key].copy_(value)
    with deterministic_math(device, "fp32"):
        wanted = added(program, updating(program, exact))
    with deterministic_math(device, precision):
        far = {
            "error": distance(added(program, works["kernels"]), wanted),
            "usual": distance(added(products, works["products"]), wanted),
        }
        row = {"work": work.name, "precision": precision, "clients": work.clients, "kernels": used}
        equal = far["error"] <= max(_CUT * far["usual"], _EXACT)
        compared(part, name, works, setting, **row, **far, equal=equal)


def program_of(work: Work, precision: Precision) -> Program:
    """Return the program that the package makes for the work."""
    programs.forget()
    programs._refused.clear()
    Bench.of(work).fit(Plan("compiled-vmap", precision=precision))
    made = [own for structure, own in programs._programs.items() if structure.plan == "compiled-vmap"]
    if not made:
        raise LookupError(f"no program could be made: {list(programs._refused.values())}")
    return made[0]


def in_fp32(work: Work) -> torch.fx.GraphModule:
    """Return the step of the work as operations on a program's memory, in fp32."""
    bench = Bench.of(work)
    start = bench.initial.expand(work.clients, -1)
    with training():
        stack = stack_of(bench.network, start, bench.samples, bench.data, bench.key, bench.recipe)
        structure = Structure.of(stack, work.clients, "compiled-vmap", "fp32")
        return Program(structure, stack, ready=False).traced()


def kernels_of(program: Program) -> int:
    """Return how many layers the program's step computes by kernels."""
    names = [str(node.target) for node in program.traced().graph.nodes]
    return sum(name.startswith("holdfast.convolve") for name in names)


def uncompiled(program: Program) -> Callable[[], None]:
    """Return the step as a compiler is given it, without a compiler."""
    return updating(program, program.traced())


def updating(program: Program, step: Callable[[Any], Any]) -> Callable[[], None]:
    def run() -> None:
        fresh = step(program.memory)
        torch._foreach_copy_([program.memory[name] for name in fresh], list(fresh.values()))

    return run


def added(program: Program, work: Callable[[], Any]) -> Tensor:
    """Return what one step adds to all parameters; the program's memory is as before afterwards."""
    before = {name: value.clone() for name, value in program.memory.items()}
    work()
    names = [name for name in before if name.startswith("params.")]
    found = torch.cat([(program.memory[name] - before[name]).flatten() for name in names])
    for name, value in before.items():
        program.memory[name].copy_(value)
    return found
