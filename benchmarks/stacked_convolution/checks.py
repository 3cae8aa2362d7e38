"""Whether the kernels are right: slow references in plain PyTorch, and how far a result may be from them.
Kernels are imported when a check runs, so that the references work without Triton."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.models.stacked_convolution.memory_order import arranged, parted
from holdfast.models.stacked_convolution.shape import Choice, Kind, Mode, Shape

TOLERANCE = {"float64": 1e-10, "tf32": 1.25 * 2**-9, "bf16": 1.25 * 2**-7}
"""float64: the largest difference allowed. tf32, bf16: the largest difference as a share of the sum of the
absolute products. TF32 keeps 10 binary places and may cut the rest off, which changes a factor by less than
2**-10 and a product by less than 2**-9; bf16 keeps 7 and rounds. The quarter is for the sums in float32."""


def by_taps(x: Tensor, weight: Tensor, bias: Tensor, g: Tensor, padding: int) -> tuple[Tensor, ...]:
    """Convolve images [n, batch, inside, h, w] with each client's weights [n, outside, inside, k, k]; return
    the results and, for the gradient `g` of the results, those of images, weights and biases. A loop over
    the places of a kernel, each a sum over channels."""
    h, w = g.shape[-2:]
    padded = F.pad(x, (padding,) * 4)
    out = bias[:, None, :, None, None].expand_as(g).clone()
    of_weight, of_padded = torch.zeros_like(weight), torch.zeros_like(padded)
    for i in range(weight.shape[-2]):
        for j in range(weight.shape[-1]):
            seen = padded[..., i : i + h, j : j + w]
            out += torch.einsum("nbchw,noc->nbohw", seen, weight[..., i, j])
            of_weight[..., i, j] = torch.einsum("nbchw,nbohw->noc", seen, g)
            of_padded[..., i : i + h, j : j + w] += torch.einsum("nbohw,noc->nbchw", g, weight[..., i, j])
    rows, columns = (slice(padding, side + padding) for side in x.shape[-2:])
    return out, of_padded[..., rows, columns], of_weight, g.sum((1, 3, 4))


def by_torch(x: Tensor, weight: Tensor, bias: Tensor, g: Tensor, padding: int) -> tuple[Tensor, ...]:
    """The same by torch.nn.functional.conv2d, one client after the other."""
    found = []
    for client in zip(x, weight, bias, g, strict=True):
        images, own, shift = (tensor.detach().requires_grad_() for tensor in client[:3])
        out = F.conv2d(images, own, shift, padding=padding)
        found.append((out.detach(), *torch.autograd.grad(out, (images, own, shift), client[3])))
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True))


def numbers(shape: Shape, clients: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Return images, weights, biases and gradients of the layer's results: normal numbers, the weights scaled
    so that results are about as large as the images."""
    luck = torch.Generator(device).manual_seed(shape.patch + clients)
    sizes = shape.images, shape.weight, (shape.outside,), shape.result
    made = [torch.randn(clients, *size, generator=luck, dtype=dtype, device=device) for size in sizes]
    made[1] /= shape.patch**0.5
    return tuple(made)


def shares(choice: Choice, device: str, clients: int = 3) -> dict[str, Any]:
    """Return the largest error of each of the kernels that have blocks, as a share of what is allowed, and
    whether a second run and the last client alone have the same bits."""
    shape, mode = choice.shape, choice.mode
    given, wanted, scales = _references(shape, clients, mode == "float64", device)
    first, again, alone = (dict(_results(choice, given, clients=part)) for part in (0, 0, 1))
    found: dict[str, Any] = {}
    for kind, got in first.items():
        places = {"forward": (0,), "weights": (2, 3), "images": (1,)}[kind]
        pairs = zip(got, places, strict=False)
        found[kind] = max(_share(value, wanted[place], scales[place], mode) for value, place in pairs)
    found["same_bits"] = all(
        torch.equal(a, b) and torch.equal(a[-1:], c)
        for kind in first
        for a, b, c in zip(first[kind], again[kind], alone[kind], strict=True)
    )
    return found


@lru_cache(maxsize=4)
def _references(
    shape: Shape, clients: int, double: bool, device: str
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return a layer's numbers, the results and gradients, and the sums of absolute products."""
    given = numbers(shape, clients, torch.float64 if double else torch.float32, device)
    exact = tuple(tensor.double() for tensor in given)
    wanted = by_torch(*exact, shape.padding)
    return given, wanted, by_taps(*(tensor.abs() for tensor in exact), shape.padding)


def right(found: dict[str, Any]) -> bool:
    """Return whether all errors are allowed and all bits the same."""
    return found["same_bits"] and all(value <= 1 for kind, value in found.items() if kind != "same_bits")


def _results(choice: Choice, given: tuple[Tensor, ...], clients: int) -> Iterator[tuple[Kind, list[Tensor]]]:
    """Yield what the kernels compute for the last clients; 0: for all."""
    from holdfast.models.stacked_convolution import kernels

    x, weight, bias, g = (tensor[-clients:].clone() for tensor in given)
    x, g = arranged(x, not choice.shape.samples), arranged(g, True)
    if "forward" in choice.blocks:
        yield "forward", [kernels.forward(x, weight, bias, choice)]
    if "weights" in choice.blocks:
        yield "weights", list(parted(kernels.of_weights(x, g, choice), choice.shape))
    if "images" in choice.blocks:
        yield "images", [kernels.of_images(g, weight, choice)]


def _share(values: Tensor, wanted: Tensor, scale: Tensor, mode: Mode) -> float:
    """Return the largest error as a share of what the tolerance allows; NaN counts as infinite."""
    error = (values.double() - wanted).abs()
    allowed = TOLERANCE[mode] * (torch.ones_like(scale) if mode == "float64" else scale)
    return float((error / allowed.clamp(min=1e-30)).nan_to_num(torch.inf, torch.inf).max())
