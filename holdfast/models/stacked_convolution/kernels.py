# mypy: allow-untyped-defs
"""Triton kernels that convolve the images of many clients, each with its own weights: forward, gradient of
the weights, gradient of the images. Patches exist only in the memory of a multiprocessor (implicit matrix
products).

Every sum has a fixed order: one program computes a block of a client's result, in a loop, without atomics.
Where a sum is split over several programs, the parts are added afterwards in their order. Neither blocks nor
splits depend on the number of clients, so a client's bits do not depend on who else is in the stack.

Channels are innermost in memory, but in images that are samples. Whoever changes a kernel raises `VERSION` in
operations.py. Set TRITON_INTERPRET=1 before this module is imported to run the kernels on a CPU, slowly."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from .memory_order import new_images
from .operations import type_of, type_of_sums
from .shape import Blocks, Choice, Kind, Shape

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _place(batch, channel, row, column, CHANNELS: tl.constexpr, SIDE: tl.constexpr, SAMPLES: tl.constexpr):
    """Return where a number of a client's images lies. It is a sum of what batch, channel, row and column
    each add, so parts can be computed apart."""
    if SAMPLES:
        return ((batch * CHANNELS + channel) * SIDE + row) * SIDE + column
    else:
        return ((batch * SIDE + row) * SIDE + column) * CHANNELS + channel


@triton.jit
def _pixel(number, SIDE: tl.constexpr):
    """Return batch, row and column of a pixel."""
    return number // (SIDE * SIDE), number // SIDE % SIDE, number % SIDE


@triton.jit
def _tap(number, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, SAMPLES: tl.constexpr):
    """Return channel, row and column of a number of a patch, in the order in which the weights lie."""
    if SAMPLES:
        channel, tap = number // (KERNEL * KERNEL), number % (KERNEL * KERNEL)
    else:
        channel, tap = number % CHANNELS, number // CHANNELS
    return channel, tap // KERNEL, tap % KERNEL


@triton.jit
def _rounded(values):
    """Round to bf16 as a GPU does: the interpreter cuts off, and cannot multiply bf16."""
    bits = values.to(tl.float32).to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _add_product(a, b, total, MODE: tl.constexpr, TURNED: tl.constexpr):
    """Add the matrix product of a and b, or its transpose if the total is turned."""
    if TURNED:
        a, b = tl.trans(b), tl.trans(a)
    if MODE == "float64":
        return total + tl.sum(a[:, :, None] * b[None, :, :], axis=1)
    elif MODE == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    elif MODE == "rounded":
        return tl.dot(_rounded(a), _rounded(b), total)
    else:
        return tl.dot(a, b, total, input_precision="tf32")


@triton.jit
def _zeros(CHANNELS: tl.constexpr, ACROSS: tl.constexpr, MODE: tl.constexpr, TURNED: tl.constexpr):
    if TURNED:
        return tl.zeros((ACROSS, CHANNELS), dtype=tl.float64 if MODE == "float64" else tl.float32)
    else:
        return tl.zeros((CHANNELS, ACROSS), dtype=tl.float64 if MODE == "float64" else tl.float32)


@triton.jit
def _store(place, total, mask, MODE: tl.constexpr):
    """Store sums as results; those in bf16 are rounded to the nearest."""
    if MODE == "rounded" and place.dtype.element_ty == tl.bfloat16:
        total = _rounded(total)
    tl.store(place, total.to(place.dtype.element_ty), mask=mask)


@triton.jit
def _patches(
    x, tap_channel, tap_row, tap_column, tap_real, batch, row, column, real,
    INSIDE: tl.constexpr, SIDE: tl.constexpr, PADDING: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Read a block [numbers of a patch, pixels] of the patches."""
    tap_place = _place(0, tap_channel, tap_row - PADDING, tap_column - PADDING, INSIDE, SIDE, SAMPLES)
    place = _place(batch, 0, row, column, INSIDE, SIDE, SAMPLES)
    inside = tap_real[:, None] & real[None, :]
    if PADDING > 0:
        y, z = (row - PADDING)[None, :] + tap_row[:, None], (column - PADDING)[None, :] + tap_column[:, None]
        inside = inside & (y >= 0) & (y < SIDE) & (z >= 0) & (z < SIDE)
    return tl.load(x + tap_place[:, None] + place[None, :], mask=inside, other=0.0)


@triton.jit
def _forward(
    x, weight, bias, out,
    BATCH: tl.constexpr, INSIDE: tl.constexpr, SIDE: tl.constexpr, OUTSIDE: tl.constexpr, OUT: tl.constexpr,
    KERNEL: tl.constexpr, PADDING: tl.constexpr, SAMPLES: tl.constexpr, MODE: tl.constexpr,
    CHANNELS: tl.constexpr, ACROSS: tl.constexpr, INNER: tl.constexpr, TURNED: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    PIXELS: tl.constexpr = BATCH * OUT * OUT
    PATCH: tl.constexpr = INSIDE * KERNEL * KERNEL
    TILES: tl.constexpr = (PIXELS + ACROSS - 1) // ACROSS
    PARTS: tl.constexpr = (OUTSIDE + CHANNELS - 1) // CHANNELS
    client = (tl.program_id(0) // (TILES * PARTS)).to(tl.int64)
    pixel = tl.program_id(0) % TILES * ACROSS + tl.arange(0, ACROSS)
    channel = tl.program_id(0) // TILES % PARTS * CHANNELS + tl.arange(0, CHANNELS)
    real, wanted = pixel < PIXELS, channel < OUTSIDE
    batch, row, column = _pixel(pixel, OUT)
    x += client * (BATCH * INSIDE * SIDE * SIDE)
    weight += client * (OUTSIDE * PATCH)
    total = _zeros(CHANNELS, ACROSS, MODE, TURNED)
    for start in range(0, PATCH, INNER):
        number = start + tl.arange(0, INNER)
        tap_channel, tap_row, tap_column = _tap(number, INSIDE, KERNEL, SAMPLES)
        patches = _patches(
            x, tap_channel, tap_row, tap_column, number < PATCH, batch, row, column, real,
            INSIDE, SIDE, PADDING, SAMPLES,
        )  # fmt: skip
        weights = tl.load(
            weight + channel[:, None] * PATCH + number[None, :],
            mask=wanted[:, None] & (number < PATCH)[None, :],
            other=0.0,
        )
        total = _add_product(weights, patches, total, MODE, TURNED)
    if TURNED:
        total = tl.trans(total)
    if BIASED:
        total += tl.load(bias + client * OUTSIDE + channel, mask=wanted, other=0.0).to(total.dtype)[:, None]
    place = client * (BATCH * OUTSIDE * OUT * OUT) + _place(
        batch[None, :], channel[:, None], row[None, :], column[None, :], OUTSIDE, OUT, False
    )
    _store(out + place, total, wanted[:, None] & real[None, :], MODE)


@triton.jit
def _of_weights(
    x, g, out,
    BATCH: tl.constexpr, INSIDE: tl.constexpr, SIDE: tl.constexpr, OUTSIDE: tl.constexpr, OUT: tl.constexpr,
    KERNEL: tl.constexpr, PADDING: tl.constexpr, SAMPLES: tl.constexpr, MODE: tl.constexpr,
    CHANNELS: tl.constexpr, ACROSS: tl.constexpr, INNER: tl.constexpr, TURNED: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """The gradient of the weights [outside, patch + 1]; the last column is the gradient of the bias, as if
    every patch ended with a one."""
    PIXELS: tl.constexpr = BATCH * OUT * OUT
    PATCH: tl.constexpr = INSIDE * KERNEL * KERNEL
    TILES: tl.constexpr = (PATCH + 1 + ACROSS - 1) // ACROSS
    PARTS: tl.constexpr = (OUTSIDE + CHANNELS - 1) // CHANNELS
    SPAN: tl.constexpr = (PIXELS + INNER * SPLITS - 1) // (INNER * SPLITS) * INNER
    part = tl.program_id(0) // (TILES * PARTS)
    client, split = (part // SPLITS).to(tl.int64), part % SPLITS
    number = tl.program_id(0) % TILES * ACROSS + tl.arange(0, ACROSS)
    channel = tl.program_id(0) // TILES % PARTS * CHANNELS + tl.arange(0, CHANNELS)
    wanted = channel < OUTSIDE
    tap_channel, tap_row, tap_column = _tap(number, INSIDE, KERNEL, SAMPLES)
    x += client * (BATCH * INSIDE * SIDE * SIDE)
    g += client * (BATCH * OUTSIDE * OUT * OUT)
    total = _zeros(CHANNELS, ACROSS, MODE, TURNED)
    for start in range(0, SPAN, INNER):
        pixel = split * SPAN + start + tl.arange(0, INNER)
        real = pixel < PIXELS
        batch, row, column = _pixel(pixel, OUT)
        place = _place(batch[None, :], channel[:, None], row[None, :], column[None, :], OUTSIDE, OUT, False)
        gradients = tl.load(g + place, mask=wanted[:, None] & real[None, :], other=0.0)
        patches = _patches(
            x, tap_channel, tap_row, tap_column, number < PATCH, batch, row, column, real,
            INSIDE, SIDE, PADDING, SAMPLES,
        )  # fmt: skip
        if MODE == "rounded":  # the interpreter has no constants in bf16
            patches = patches.to(tl.float32)
        patches = tl.where((number == PATCH)[:, None], 1.0, patches).to(patches.dtype)
        total = _add_product(gradients, tl.trans(patches), total, MODE, TURNED)
    if TURNED:
        total = tl.trans(total)
    place = (client * SPLITS + split) * (OUTSIDE * (PATCH + 1))
    place += channel[:, None] * (PATCH + 1) + number[None, :]
    tl.store(out + place, total, mask=wanted[:, None] & (number <= PATCH)[None, :])


@triton.jit
def _of_images(
    g, weight, out,
    BATCH: tl.constexpr, INSIDE: tl.constexpr, SIDE: tl.constexpr, OUTSIDE: tl.constexpr, OUT: tl.constexpr,
    KERNEL: tl.constexpr, PADDING: tl.constexpr, SAMPLES: tl.constexpr, MODE: tl.constexpr,
    CHANNELS: tl.constexpr, ACROSS: tl.constexpr, INNER: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The gradient of the images: every pixel gathers from the results it had a part in. Weights lie as
    [inside, row, column, outside]."""
    PIXELS: tl.constexpr = BATCH * SIDE * SIDE
    TAPS: tl.constexpr = KERNEL * KERNEL
    TILES: tl.constexpr = (PIXELS + ACROSS - 1) // ACROSS
    PARTS: tl.constexpr = (INSIDE + CHANNELS - 1) // CHANNELS
    client = (tl.program_id(0) // (TILES * PARTS)).to(tl.int64)
    pixel = tl.program_id(0) % TILES * ACROSS + tl.arange(0, ACROSS)
    channel = tl.program_id(0) // TILES % PARTS * CHANNELS + tl.arange(0, CHANNELS)
    real, wanted = pixel < PIXELS, channel < INSIDE
    batch, row, column = _pixel(pixel, SIDE)
    g += client * (BATCH * OUTSIDE * OUT * OUT)
    weight += client * (OUTSIDE * INSIDE * TAPS)
    total = _zeros(CHANNELS, ACROSS, MODE, TURNED)
    for start in range(0, OUTSIDE * TAPS, INNER):
        number = start + tl.arange(0, INNER)
        some = number < OUTSIDE * TAPS
        source, tap_row, tap_column = _tap(number, OUTSIDE, KERNEL, False)
        y = (row + PADDING)[None, :] - tap_row[:, None]
        z = (column + PADDING)[None, :] - tap_column[:, None]
        inside = some[:, None] & real[None, :] & (y >= 0) & (y < OUT) & (z >= 0) & (z < OUT)
        gradients = tl.load(
            g + _place(batch[None, :], source[:, None], y, z, OUTSIDE, OUT, False), mask=inside, other=0.0
        )
        weights = tl.load(
            weight + channel[:, None] * (OUTSIDE * TAPS) + number[None, :],
            mask=wanted[:, None] & some[None, :],
            other=0.0,
        )
        total = _add_product(weights, gradients, total, MODE, TURNED)
    if TURNED:
        total = tl.trans(total)
    place = client * (BATCH * INSIDE * SIDE * SIDE) + _place(
        batch[None, :], channel[:, None], row[None, :], column[None, :], INSIDE, SIDE, SAMPLES
    )
    _store(out + place, total, wanted[:, None] & real[None, :], MODE)


@triton.jit
def _add_parts(parts, out, SIZE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the parts of a sum in their order. PyTorch's sum may choose another order for another number of
    clients."""
    client = (tl.program_id(0) // ((SIZE + BLOCK - 1) // BLOCK)).to(tl.int64)
    place = tl.program_id(0) % ((SIZE + BLOCK - 1) // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + client * (SPLITS * SIZE) + place, mask=place < SIZE)
    for part in range(1, SPLITS):
        total += tl.load(parts + (client * SPLITS + part) * SIZE + place, mask=place < SIZE)
    tl.store(out + client * SIZE + place, total, mask=place < SIZE)


KERNELS = {"forward": _forward, "weights": _of_weights, "images": _of_images}


def constants(kind: Kind, choice: Choice, biased: bool = True) -> dict[str, object]:
    """What a kernel is compiled for."""
    shape, blocks = choice.shape, choice.blocks[kind]
    found: dict[str, object] = {
        "BATCH": shape.batch, "INSIDE": shape.inside, "SIDE": shape.side, "OUTSIDE": shape.outside,
        "OUT": shape.out, "KERNEL": shape.kernel, "PADDING": shape.padding, "SAMPLES": shape.samples,
        "MODE": "rounded" if INTERPRETED and choice.mode == "bf16" else choice.mode,
        "CHANNELS": blocks.channels, "ACROSS": blocks.across, "INNER": blocks.inner, "TURNED": blocks.turned,
    }  # fmt: skip
    own: dict[Kind, dict[str, object]] = {"forward": {"BIASED": biased}, "weights": {"SPLITS": blocks.splits}}
    return found | own.get(kind, {})


def programs(kind: Kind, shape: Shape, blocks: Blocks) -> int:
    """Return how many programs one client needs."""
    channels = shape.inside if kind == "images" else shape.outside
    across = {
        "forward": shape.batch * shape.out**2,
        "weights": shape.patch + 1,
        "images": shape.batch * shape.side**2,
    }[kind]
    splits = blocks.splits if kind == "weights" else 1
    return -(-channels // blocks.channels) * -(-across // blocks.across) * splits


def _launch(kind: Kind, choice: Choice, *tensors: Tensor, biased: bool = True) -> None:
    blocks = choice.blocks[kind]
    grid = (tensors[0].shape[0] * programs(kind, choice.shape, blocks),)
    settings = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    KERNELS[kind][grid](*tensors, **constants(kind, choice, biased), **settings)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, choice: Choice) -> Tensor:
    """Return the results [n, ...]. Images are given as `memory_order.arranged` returns them, weights and
    biases contiguous."""
    out = new_images(x, (len(x), *choice.shape.result), True, type_of(x, weight))
    weight = weight if choice.shape.samples else weight.movedim(2, -1).contiguous()
    _launch("forward", choice, x, weight, out if bias is None else bias, out, biased=bias is not None)
    return out


def of_weights(x: Tensor, g: Tensor, choice: Choice) -> Tensor:
    """Return the gradients of weights and biases as one tensor [n, outside, patch + 1], for
    `memory_order.parted`."""
    splits, shape = choice.blocks["weights"].splits, choice.shape
    out = x.new_empty(len(x), splits, shape.outside, shape.patch + 1, dtype=type_of_sums(x))
    _launch("weights", choice, x, g, out)
    if splits == 1:
        return out.squeeze(1)
    whole, size = torch.empty_like(out[:, 0], memory_format=torch.contiguous_format), out[0, 0].numel()
    _add_parts[(len(x) * -(-size // 1024),)](out, whole, size, splits, 1024)
    return whole


def of_images(g: Tensor, weight: Tensor, choice: Choice) -> Tensor:
    """Return the gradient of the images."""
    shape = choice.shape
    out = new_images(g, (len(g), *shape.images), not shape.samples, g.dtype)
    _launch("images", choice, g, weight.permute(0, 2, 3, 4, 1).contiguous(), out)
    return out
