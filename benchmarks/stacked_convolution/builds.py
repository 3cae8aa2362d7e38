"""Compiles everything that is tried for an H200, which need not be here."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from holdfast.models.stacked_convolution import kernels
from holdfast.models.stacked_convolution.blocks import rule
from holdfast.models.stacked_convolution.shape import Blocks, Choice, Kind, Mode, Shape

from .setting import Setting

if TYPE_CHECKING:
    from ..convolution_kernel import Report


def build_all(report: Report, setting: Setting) -> None:
    report.say("bytes of shared memory of a program, registers of a thread, bytes that do not fit into them")
    cases: list[tuple[str, Shape, Kind, Blocks]] = []
    for (layer, kind), tried in setting.tried.items():
        cases += [(layer, setting.shapes[layer], kind, own) for own in tried]
    for layer, shape in setting.networks.items():
        cases += [(layer, shape, kind, own) for kind, own in rule(shape).items()]
    failed = 0
    for precision in setting.precisions_of_steps:
        mode: Mode = "tf32" if precision == "tf32" else "bf16"
        for layer, shape, kind, own in cases:
            row = {"layer": layer, "kind": kind, "blocks": own._asdict(), "precision": precision}
            try:
                row |= built(kind, Choice(shape, {kind: own}, mode), precision == "bf16-activations")
                figures = f"{row['shared']:7} {row['registers']} {row['spilled']}"
            except Exception as error:
                failed += 1
                row["why"] = figures = f"failed: {type(error).__name__}: {str(error)[:150]}"
            report.say(f"{layer:24} {kind:7} {own!s:34} {precision:16} {figures}", "built", **row)
    report.say(f"{len(report.found['built']) - failed} compiled, {failed} failed")


def built(kind: Kind, choice: Choice, half: bool = False) -> dict[str, int | None]:
    """Compile a kernel, for tensors in bfloat16 if `half`; return the bytes of shared memory of a program and
    the registers of a thread, and how many bytes of a thread do not fit into them."""
    kernel, settings, blocks = kernels.KERNELS[kind], kernels.constants(kind, choice), choice.blocks[kind]
    names, number = kernel.arg_names, "*fp64" if choice.mode == "float64" else "*bf16" if half else "*fp32"
    types = {name: "constexpr" if name in settings else number for name in names}
    if half and kind == "weights":
        types["out"] = "*fp32"
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in settings}
    constants = {(names.index(name),): value for name, value in settings.items()}
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    source, target = ASTSource(kernel, types, constants, aligned), GPUTarget("cuda", 90, 32)
    built = triton.compile(source, target=target, options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", said)
    registers, spilled = (int(used[1]), int(used[2])) if used else (None, None)
    return {"shared": built.metadata.shared, "registers": registers, "spilled": spilled}
