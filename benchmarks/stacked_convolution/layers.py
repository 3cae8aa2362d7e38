"""Single layers: results and gradients by products as the package compiles them, and by the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from holdfast.core.device import autocast, deterministic_math
from holdfast.local import programs
from holdfast.local.compiled_code import Traced, compiled
from holdfast.local.program import _traced
from holdfast.models.batched_convolution import as_products, folded
from holdfast.models.stacked_convolution import kernels
from holdfast.models.stacked_convolution.blocks import rule
from holdfast.models.stacked_convolution.memory_order import arranged, parted
from holdfast.models.stacked_convolution.shape import Blocks, Choice, Kind, Mode, Shape

from .checks import numbers, right, shares
from .setting import SLOW, SMALL, Setting
from .timing import compared, distance, medians, repeated

if TYPE_CHECKING:
    from ..convolution_kernel import Part

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
            _check(part, "small", Choice(shape, blocks, mode), setting.device)
    if setting.device == "cpu":
        return
    for layer, shape in setting.shapes.items():
        _check(part, layer, Choice(shape, dict.fromkeys(shape.kinds, SLOW), "float64"), setting.device)
        for mode in setting.precisions:
            _check(part, layer, setting.choice(shape, mode), setting.device)


def _check(part: Part, name: str, choice: Choice, device: str) -> None:
    title = f"{name:6} {choice.shape} {choice.mode:7}"

    def work() -> None:
        with deterministic_math(torch.device(device), "tf32"):
            found = shares(choice, device)
        figures = "  ".join(f"{kind} {found[kind]:.1e}" for kind in choice.blocks)
        words = "same bits" if found["same_bits"] else "OTHER BITS", "equal" if right(found) else "NOT EQUAL"
        row = {"shape": choice.shape._asdict(), "mode": choice.mode, **found}
        part.report.say(f"  {title} {figures}  {'  '.join(words)}", part.name, **row, equal=right(found))

    part.item(title, work)


# ---- blocks


def blocks(part: Part, setting: Setting) -> None:
    """Find the fastest blocks of each kernel."""
    part.report.say("  microseconds of one client; the first in each line is the package's choice")
    for mode in setting.precisions:
        for layer, shape in setting.shapes.items():
            tried = {kind: setting.tried[layer, kind] for kind in shape.kinds}
            times = _times(part, setting, layer, Choice(shape, {}, mode), tried, setting.clients[0])
            for kind, found in times.items():
                said = ", ".join(f"{own} {micro:.2f}" for own, micro in found.items())
                part.report.say(f"  {layer:6} {kind:7} {mode}: {said}")


def _times(
    part: Part,
    setting: Setting,
    layer: str,
    empty: Choice,
    tried: dict[Kind, tuple[Blocks, ...]],
    clients: int,
) -> dict[Kind, dict[Blocks, float]]:
    """Return the microseconds of one client for each kernel of a layer and each of these blocks."""
    found: dict[Kind, dict[Blocks, float]] = {}
    tensors = numbers(empty.shape, clients, torch.float32, setting.device)

    def work(kind: Kind, own: Blocks) -> None:
        micro = _time_of(replace(empty, blocks={kind: own}), kind, tensors, setting) / clients * 1e6
        found.setdefault(kind, {})[own] = micro
        row = {"layer": layer, "kind": kind, "mode": empty.mode, "blocks": own._asdict()}
        part.report.found.setdefault("tried", []).append(row | {"microseconds": micro})

    for kind in empty.shape.kinds:
        for own in tried[kind]:
            part.item(f"{layer} {kind} {empty.mode} {own}", partial(work, kind, own))
    return found


def _time_of(choice: Choice, kind: Kind, tensors: tuple[Tensor, ...], setting: Setting) -> float:
    """Check one kernel, then time it."""
    x, weight, bias, g = tensors
    x, g = arranged(x, not choice.shape.samples), arranged(g, True)
    run: Callable[[], Any] = {
        "forward": lambda: kernels.forward(x, weight, bias, choice),
        "weights": lambda: kernels.of_weights(x, g, choice),
        "images": lambda: kernels.of_images(g, weight, choice),
    }[kind]
    with deterministic_math(torch.device(setting.device), "tf32"):
        found = shares(choice, setting.device)
        if not right(found):
            raise ArithmeticError(f"not equal: {found}")
        quick = replace(setting, seconds=setting.seconds / 6)
        return medians({"one": repeated(run, setting.device)}, quick, 3)["one"]


# ---- layers


def by_products(shape: Shape, mode: Mode, tensors: tuple[Tensor, ...]) -> Callable[[], list[Tensor]]:
    """The layer's results and gradients by patches and matrix products, compiled."""
    net = nn.Sequential(folded(nn.Conv2d(shape.inside, shape.outside, shape.kernel, padding=shape.padding)))

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
    x, g = arranged(x, not choice.shape.samples), arranged(g, True)

    def run() -> list[Tensor]:
        out = kernels.forward(x, weight, bias, choice)
        found = [out, *parted(kernels.of_weights(x, g, choice), choice.shape)]
        return found if choice.shape.samples else [*found, kernels.of_images(g, weight, choice)]

    return run


def layers(part: Part, setting: Setting) -> None:
    """Time each layer of FedCAP's network in both forms, the kernels with the package's blocks."""
    part.report.say("  microseconds of one client: results and gradients; difference: of the two forms")
    for clients in setting.clients:
        for mode in setting.precisions:
            for layer, shape in setting.shapes.items():
                name, choice = f"{layer:6} {mode} {clients:3} clients", setting.choice(shape, mode)
                part.item(name, partial(_layer, part, setting, layer, choice, clients, name))
                programs.forget()  # what graphs held goes back to the device


def _layer(part: Part, setting: Setting, layer: str, choice: Choice, clients: int, name: str) -> float:
    with deterministic_math(torch.device(setting.device), "tf32"):
        tensors = numbers(choice.shape, clients, torch.float32, setting.device)
        forms = {
            "products": by_products(choice.shape, choice.mode, tensors),
            "kernels": by_choice(choice, tensors),
        }
        both = zip(forms["kernels"](), forms["products"](), strict=True)
        apart = max(distance(ours, theirs) for ours, theirs in both)
        works = {form: repeated(run, setting.device) for form, run in forms.items()}
        row = {"layer": layer, "mode": choice.mode, "clients": clients, "difference": apart}
        return compared(part, name, works, setting, **row)


# ---- shapes


def shapes(part: Part, setting: Setting) -> None:
    """Time layers of other networks in both forms, with the fastest of the rule's blocks and those with
    another number of stages; print what may go into the package's table."""
    part.report.say("  microseconds of one client: results and gradients; difference: of the two forms")
    part.report.say("  under each layer its entry for holdfast/models/stacked_convolution/blocks.py")
    for mode in setting.precisions:
        for layer, shape in setting.networks.items():
            part.item(f"{layer} {mode}", partial(_shape, part, setting, layer, shape, mode))
            programs.forget()


def _shape(part: Part, setting: Setting, layer: str, shape: Shape, mode: Mode) -> None:
    tried: dict[Kind, tuple[Blocks, ...]] = {
        kind: (own, own._replace(stages=3 if own.stages == 1 else 1)) for kind, own in rule(shape).items()
    }
    times = _times(part, setting, layer, Choice(shape, {}, mode), tried, setting.clients_of_networks[0])
    chosen = {kind: min(found, key=lambda own: found[own]) for kind, found in times.items()}  # noqa: B023
    choice = Choice(shape, chosen, mode)
    ratios = []
    for clients in setting.clients_of_networks:
        name = f"{layer:24} {mode} {clients:3} clients"
        ratios.append(_layer(part, setting, layer, choice, clients, name))
        programs.forget()
    entry = f"Measured({shape!r}, {shape.batch}, {chosen!r}),"
    row = {"shape": shape._asdict(), "mode": mode, "ratios": ratios}
    row["blocks"] = {kind: own._asdict() for kind, own in chosen.items()}
    part.report.say(f"    {min(ratios):.2f}x or more: {entry}", "entries", layer=layer, **row)
