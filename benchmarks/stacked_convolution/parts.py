"""The parts of convolution_kernel.py, each a table of lines: what is checked, tried and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from holdfast.bench.steps import Bench, Work
from holdfast.core.device import autocast, deterministic_math
from holdfast.local import programs
from holdfast.local.compiled_code import Traced, compiled
from holdfast.local.plan import Plan
from holdfast.local.program import Program, _captured, _traced
from holdfast.models.batched_convolution import as_products, folded

from . import kernels
from .checks import built_for_h200, numbers, right, shares
from .layer import Blocks, Choice, Kind, Mode, Shape
from .operations import by_kernels
from .setting import SLOW, SMALL, Choices, Setting

if TYPE_CHECKING:
    from ..convolution_kernel import Part, Report

# ---- equality


def equality(part: Part, setting: Setting) -> None:
    """Compare the kernels with torch's convolution of each client in float64, and their bits with their
    own."""
    part.report.say("  largest error as a share of what is allowed: 1e-10 in float64; in TF32 and bf16")
    part.report.say("  1.25 * 2**-9 and 1.25 * 2**-7 of the sum of absolute products (checks.py says why)")
    modes: tuple[Mode, ...] = ("float64", "tf32", "bf16")
    for place, shape in enumerate(SMALL):
        blocks = {kind: SLOW._replace(turned=place % 2 == 1) for kind in shape.kinds}
        for mode in modes:
            _check(part, "small", Choice(shape, blocks, mode, place != 1), setting.device)
    if setting.device == "cpu":
        return
    for (layer, pooled, _), choice in setting.first_choices().items():
        _check(part, layer, choice, setting.device)
        if choice.mode == "tf32":
            shape = setting.layers(pooled)[layer]
            slow = Choice(shape, {kind: SLOW for kind in shape.kinds}, "float64", choice.innermost)
            _check(part, layer, slow, setting.device)


def _check(part: Part, name: str, choice: Choice, device: str) -> None:
    title = f"{name:6} {choice.shape} {choice.mode:7}"

    def work() -> None:
        with deterministic_math(torch.device(device), "tf32"):
            found = shares(choice, device)
        figures = "  ".join(f"{kind} {found[kind]:.1e}" for kind in choice.blocks)
        words = "same bits" if found["same_bits"] else "OTHER BITS", "equal" if right(found) else "NOT EQUAL"
        row = {"shape": asdict(choice.shape), "mode": choice.mode, "innermost": choice.innermost, **found}
        part.report.say(f"  {title} {figures}  {'  '.join(words)}", part.name, **row, equal=right(found))

    part.item(title, work)


# ---- timing


def _repeated(run: Callable[[], Any], device: str) -> Callable[[], Any]:
    """Return the work as one call: on a GPU a captured graph."""
    if device != "cuda":
        return run
    kept: list[Any] = []

    def keeping() -> None:
        kept[:] = [run()]

    graph = _captured(keeping, torch.device("cuda", torch.cuda.current_device()))

    def replay() -> list[Any]:
        graph.replay()
        return kept  # the graph writes to the results of the call that was captured, so they have to stay

    return replay


def _seconds(work: Callable[[], Any], repeats: int, device: str) -> float:
    if device != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / repeats


def medians(forms: dict[str, Callable[[], Any]], setting: Setting, turns: int) -> dict[str, float]:
    """Let the forms take turns; return the median of the seconds of each."""
    repeats = {}
    for name, work in forms.items():
        work()
        repeats[name] = max(1, min(500, int(setting.seconds / _seconds(work, 1, setting.device))))
    found: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(turns):
        for name, work in forms.items():
            found[name].append(_seconds(work, repeats[name], setting.device))
    return {name: statistics.median(times) for name, times in found.items()}


def _compared(
    part: Part, name: str, works: dict[str, Callable[[], Any]], setting: Setting, apart: float, **row: Any
) -> None:
    """Time both forms and print a line."""
    times = medians(works, setting, setting.turns)
    ratio, each = times["today"] / times["kernels"], {form: t / row["clients"] for form, t in times.items()}
    part.report.say(
        f"  {name:34} today {each['today'] * 1e6:9.2f}  kernels {each['kernels'] * 1e6:9.2f}"
        f"  {ratio:5.2f}x  difference {apart:.1e}",
        part.name,
        **{**row, "seconds": times, "ratio": ratio, "apart": apart},
    )


def _apart(a: Tensor, b: Tensor) -> float:
    """Return the norm of a difference as a share of the norm."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


# ---- blocks


def blocks(part: Part, setting: Setting) -> Choices:
    """Time every kernel with every size of blocks for the largest number of clients, and return the fastest.
    Microseconds are those of a client. Both layers get the same layout: what one writes the other reads."""
    best: Choices = {}
    for mode in setting.precisions:
        for pooled in (False, True):
            able = []
            for innermost in setting.layouts:
                found = {
                    layer: _fastest(part, setting, layer, Choice(shape, {}, mode, innermost))
                    for layer, shape in setting.layers(pooled).items()
                }
                if all(choice.blocks for _, choice in found.values()):
                    able.append((sum(seconds for seconds, _ in found.values()), innermost, found))
            for layer, (seconds, choice) in min(able, key=lambda one: one[0])[2].items() if able else ():
                best[layer, pooled, mode] = choice
                _say_chosen(part, layer, choice, seconds, setting.clients[0])
    return best


def _fastest(part: Part, setting: Setting, layer: str, empty: Choice) -> tuple[float, Choice]:
    """Return the seconds of all kernels of a layer and its fastest blocks; no blocks if a kernel has none."""
    total, chosen = 0.0, dict[Kind, Blocks]()
    tensors = numbers(empty.shape, setting.clients[0], torch.float32, setting.device)
    for kind in empty.shape.kinds:
        times: dict[Blocks, float] = {}
        for own in setting.tried[layer, kind]:
            choice = replace(empty, blocks={kind: own})

            def work(kind: Kind = kind, own: Blocks = own, choice: Choice = choice) -> None:
                times[own] = _time_of(choice, kind, tensors, setting)  # noqa: B023
                row = {"layer": layer, "kind": kind, "pooled": empty.shape.pooled, "mode": empty.mode}
                row |= {"innermost": empty.innermost, "blocks": own._asdict(), "seconds": times[own]}  # noqa: B023
                part.report.found.setdefault("tried", []).append(row)

            part.item(f"{layer} {'pooled ' * empty.shape.pooled}{kind} {empty.mode} {own}", work)
        if not times:
            return 0.0, empty
        chosen[kind] = min(times, key=lambda own: times[own])  # noqa: B023
        total += times[chosen[kind]]
    return total, replace(empty, blocks=chosen)


def _time_of(choice: Choice, kind: Kind, tensors: tuple[Tensor, ...], setting: Setting) -> float:
    """Check one kernel, then time it."""
    x, weight, bias, g = tensors
    x, g = kernels.arranged(x, choice.reads_innermost), kernels.arranged(g, choice.innermost)
    won = torch.randint_like(g, 5, dtype=torch.uint8) if choice.shape.pooled else g
    run: Callable[[], Any] = {
        "forward": lambda: kernels.forward(x, weight, bias, choice),
        "weights": lambda: kernels.of_weights(x, g, won, choice),
        "images": lambda: kernels.of_images(g, won, weight, choice),
    }[kind]
    with deterministic_math(torch.device(setting.device), choice.mode):
        found = shares(choice, setting.device)
        if not right(found):
            raise ArithmeticError(f"not equal: {found}")
        quick = replace(setting, seconds=setting.seconds / 6)
        return medians({"one": _repeated(run, setting.device)}, quick, 3)["one"]


def _say_chosen(part: Part, layer: str, choice: Choice, seconds: float, clients: int) -> None:
    shape, used = choice.shape, ", ".join(f"{kind} {own}" for kind, own in choice.blocks.items())
    where, each = "innermost" if choice.innermost else "outside", seconds / clients * 1e6
    part.report.say(
        f"  {layer:6} {'pooled' * shape.pooled:6} {choice.mode}: {used}; channels {where}: {each:.2f} us",
        part.name,
        **{"layer": layer, "pooled": shape.pooled, "mode": choice.mode, "innermost": choice.innermost},
        **{"blocks": {kind: own._asdict() for kind, own in choice.blocks.items()}, "seconds": seconds},
    )


# ---- layers


def today(shape: Shape, mode: Mode, tensors: tuple[Tensor, ...]) -> Callable[[], list[Tensor]]:
    """The layer's results and gradients as the package computes them: patches, matrix products, compiled."""
    conv = nn.Conv2d(shape.inside, shape.outside, shape.kernel, padding=shape.padding)
    after = [nn.ReLU(), nn.MaxPool2d(2)] if shape.pooled else []
    net = nn.Sequential(*map(folded, [conv, *after]))

    def one(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional_call(net, {"0.weight": weight, "0.bias": bias}, (x,))

    def both(x: Tensor, weight: Tensor, bias: Tensor, g: Tensor) -> list[Tensor]:
        wanted = [tensor.detach().requires_grad_() for tensor in (weight, bias, x)]
        with autocast(g.device, "bf16" if mode == "bf16" else "tf32"):
            out = vmap(one)(x if shape.samples else wanted[2], *wanted[:2])
        wanted = wanted[:2] if shape.samples else wanted
        return [out.detach(), *torch.autograd.grad(out, wanted, g.to(out.dtype))]

    with as_products():
        traced = Traced.of(_traced(both, *tensors))
    step = compiled(traced, tensors[0].device, "bf16" if mode == "bf16" else "tf32")
    return lambda: step(*tensors)


def by_choice(choice: Choice, tensors: tuple[Tensor, ...]) -> Callable[[], list[Tensor]]:
    """The same by the kernels."""
    x, weight, bias, g = tensors
    x, g = kernels.arranged(x, choice.reads_innermost), kernels.arranged(g, choice.innermost)

    def run() -> list[Tensor]:
        out, winner = kernels.forward(x, weight, bias, choice)
        found = [out, *kernels.parted(kernels.of_weights(x, g, winner, choice), choice)]
        return found if choice.shape.samples else [*found, kernels.of_images(g, winner, weight, choice)]

    return run


def layers(part: Part, setting: Setting, choices: Choices) -> None:
    """Time each layer in both forms."""
    part.report.say("  microseconds of one client: results and gradients; difference: of the two forms")
    for clients in setting.clients:
        for mode in setting.precisions:
            for pooled in (False, True):
                for layer in setting.shapes:
                    name = f"{layer:6} {'pooled' * pooled:6} {mode} {clients:3} clients"
                    choice = choices[layer, pooled, mode]
                    part.item(name, partial(_layer, part, setting, layer, choice, clients, name))
                    programs.forget()  # what graphs held goes back to the device


def _layer(part: Part, setting: Setting, layer: str, choice: Choice, clients: int, name: str) -> None:
    shape = choice.shape
    with deterministic_math(torch.device(setting.device), choice.mode):
        tensors = numbers(shape, clients, torch.float32, setting.device)
        forms = {"today": today(shape, choice.mode, tensors), "kernels": by_choice(choice, tensors)}
        both = zip(forms["kernels"](), forms["today"](), strict=True)
        apart = max(_apart(ours, theirs) for ours, theirs in both)
        works = {form: _repeated(run, setting.device) for form, run in forms.items()}
        row = {"layer": layer, "pooled": shape.pooled, "mode": choice.mode, "clients": clients}
        _compared(part, name, works, setting, apart, **row)


# ---- the whole step


def step(part: Part, setting: Setting, choices: Choices) -> None:
    """Time a whole step of the package's program, with its convolutions in both forms (ReLU and pooling are
    the compiler's in both)."""
    part.report.say("  microseconds of one client's step; difference: of what it adds to the parameters")
    for work in setting.works:
        for mode in setting.precisions:
            layers = setting.in_works.items()
            own = [replace(choices[layer, False, mode], shape=shape) for layer, shape in layers]
            part.item(f"{work.name} {mode}", partial(_step, part, setting, work, mode, own))
            programs.forget()


def _step(part: Part, setting: Setting, work: Work, mode: Mode, own: list[Choice]) -> None:
    device, program = torch.device(setting.device), _program(work, mode)
    on_gpu = device.type == "cuda"
    with deterministic_math(device, mode):
        with by_kernels(own) as used:
            run = program._advance() if on_gpu else _uncompiled(program)
        if len(used) != len(own):
            raise LookupError(f"the kernels took the place of {len(used)} of {len(own)} convolutions")
        works = {
            "today": program.replay if on_gpu else _uncompiled(program),
            "kernels": _repeated(run, setting.device),
        }
        added = {form: _added(program, works[form]) for form in works}
        row = {"work": work.name, "mode": mode, "clients": work.clients}
        apart = _apart(added["kernels"], added["today"])
        _compared(part, f"{work.name} {mode}", works, setting, apart, **row)


def _program(work: Work, mode: Mode) -> Program:
    """Return the program that the package makes for the work."""
    programs.forget()
    Bench.of(work).fit(Plan("compiled-vmap", precision="bf16" if mode == "bf16" else "tf32"))
    made = [own for structure, own in programs._programs.items() if structure.plan == "compiled-vmap"]
    if not made:
        raise LookupError(f"no program could be made: {list(programs._refused.values())}")
    return made[0]


def _uncompiled(program: Program) -> Callable[[], None]:
    """Return the step as a compiler is given it, without a compiler."""
    traced = program.traced()

    def run() -> None:
        fresh = traced(program.memory)
        torch._foreach_copy_([program.memory[name] for name in fresh], list(fresh.values()))

    return run


def _added(program: Program, work: Callable[[], Any]) -> Tensor:
    """Return what one step adds to all parameters; the program's memory is as before afterwards."""
    before = {name: value.clone() for name, value in program.memory.items()}
    work()
    names = [name for name in before if name.startswith("params.")]
    added = torch.cat([(program.memory[name] - before[name]).flatten() for name in names])
    for name, value in before.items():
        program.memory[name].copy_(value)
    return added


# ---- compiling only


def build_all(report: Report, setting: Setting) -> None:
    """Compile everything that is tried for an H200."""
    report.say("bytes of shared memory of a program, registers of a thread, bytes that do not fit into them")
    failed = 0
    for (layer, kind), tried in setting.tried.items():
        cases = [(innermost, pooled) for innermost in setting.layouts for pooled in (False, True)]
        for own, (innermost, pooled), mode in (
            (own, case, mode) for own in tried for case in cases for mode in setting.precisions
        ):
            choice = Choice(setting.layers(pooled)[layer], {kind: own}, mode, innermost)
            row = {"layer": layer, "kind": kind, "blocks": own._asdict(), "mode": mode}
            row |= {"innermost": innermost, "pooled": pooled}
            try:
                row |= built_for_h200(kind, choice)
                figures = f"{row['shared']:7} {row['registers']} {row['spilled']}"
            except Exception as error:
                failed += 1
                row["why"] = figures = f"failed: {type(error).__name__}: {str(error)[:150]}"
            where = "innermost" if innermost else "outside"
            title = f"{layer:6} {kind:7} {own!s:30} {mode} {where:9} {'pooled' * pooled:6}"
            report.say(f"{title} {figures}", "built", **row)
    report.say(f"{len(report.found['built']) - failed} compiled, {failed} failed")
