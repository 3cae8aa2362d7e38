"""Triton kernels that convolve the images of many clients, each with its own weights: forward, gradient of
the weights, gradient of the images. Patches exist only in the memory of a multiprocessor (implicit matrix
products). The package does not use them.

Every sum has a fixed order: one program computes a block of a client's result, in a loop, without atomics.
Where a sum is split over several programs, the parts are added afterwards in their order. Neither blocks nor
splits depend on the number of clients, so a client's bits do not depend on who else is in the stack.

Set TRITON_INTERPRET=1 before this module is imported to run the kernels on a CPU, very slowly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layer import Blocks, Choice, Kind, Shape

INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _place(batch, channel, row, column, CHANNELS: tl.constexpr, SIDE: tl.constexpr, INNERMOST: tl.constexpr):
    """Return where a number of a client's images lies. It is a sum of what batch, channel, row and column
    each add, so parts can be computed apart."""
    if INNERMOST:
        return ((batch * SIDE + row) * SIDE + column) * CHANNELS + channel
    else:
        return ((batch * CHANNELS + channel) * SIDE + row) * SIDE + column


@triton.jit
def _pixel(number, SIDE: tl.constexpr, POOLED: tl.constexpr):
    """Return batch, row and column of a pixel; with pooling, a window's four pixels follow each other."""
    if POOLED:
        within, window = number % 4, number // 4
        row = window // (SIDE // 2) % (SIDE // 2) * 2 + within // 2
        column = window % (SIDE // 2) * 2 + within % 2
    else:
        row, column = number // SIDE % SIDE, number % SIDE
    return number // (SIDE * SIDE), row, column


@triton.jit
def _tap(number, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, INNERMOST: tl.constexpr):
    """Return channel, row and column of a number of a patch, in the order in which the weights lie."""
    if INNERMOST:
        channel, tap = number % CHANNELS, number // CHANNELS
    else:
        channel, tap = number // (KERNEL * KERNEL), number % (KERNEL * KERNEL)
    return channel, tap // KERNEL, tap % KERNEL


@triton.jit
def _rounded(values):
    """Round to bf16 as a GPU does: the interpreter cuts off, and cannot multiply bf16."""
    bits = values.to(tl.uint32, bitcast=True)
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
def _patches(
    x, tap_channel, tap_row, tap_column, tap_real, batch, row, column, real,
    INSIDE: tl.constexpr, SIDE: tl.constexpr, PADDING: tl.constexpr, INNERMOST: tl.constexpr,
):  # fmt: skip
    """Read a block [numbers of a patch, pixels] of the patches."""
    tap_place = _place(0, tap_channel, tap_row - PADDING, tap_column - PADDING, INSIDE, SIDE, INNERMOST)
    place = _place(batch, 0, row, column, INSIDE, SIDE, INNERMOST)
    inside = tap_real[:, None] & real[None, :]
    if PADDING > 0:
        y, z = (row - PADDING)[None, :] + tap_row[:, None], (column - PADDING)[None, :] + tap_column[:, None]
        inside = inside & (y >= 0) & (y < SIDE) & (z >= 0) & (z < SIDE)
    return tl.load(x + tap_place[:, None] + place[None, :], mask=inside, other=0.0)


@triton.jit
def _gradients(
    g, winner, channel, row, column, batch, inside,
    OUTSIDE: tl.constexpr, OUT: tl.constexpr, POOLED: tl.constexpr, INNERMOST: tl.constexpr,
):  # fmt: skip
    """Read gradients of the convolution's result, at places given as tensors of the block's shape. With
    pooling a pixel that did not win its window has none; 4 says that no pixel did: none is above zero."""
    if POOLED:
        place = _place(batch, channel, row // 2, column // 2, OUTSIDE, OUT // 2, INNERMOST)
        own = row % 2 * 2 + column % 2
        won = tl.load(winner + place, mask=inside, other=4).to(tl.int32) == own
        return tl.load(g + place, mask=inside & won, other=0.0)
    else:
        place = _place(batch, channel, row, column, OUTSIDE, OUT, INNERMOST)
        return tl.load(g + place, mask=inside, other=0.0)


@triton.jit
def _forward(
    x, weight, bias, out, winner,
    BATCH: tl.constexpr, INSIDE: tl.constexpr, SIDE: tl.constexpr, OUTSIDE: tl.constexpr, OUT: tl.constexpr,
    KERNEL: tl.constexpr, PADDING: tl.constexpr, POOLED: tl.constexpr, READS: tl.constexpr,
    INNERMOST: tl.constexpr, MODE: tl.constexpr, CHANNELS: tl.constexpr, ACROSS: tl.constexpr,
    INNER: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    PIXELS: tl.constexpr = BATCH * OUT * OUT
    PATCH: tl.constexpr = INSIDE * KERNEL * KERNEL
    TILES: tl.constexpr = (PIXELS + ACROSS - 1) // ACROSS
    PARTS: tl.constexpr = (OUTSIDE + CHANNELS - 1) // CHANNELS
    client = (tl.program_id(0) // (TILES * PARTS)).to(tl.int64)
    pixel = tl.program_id(0) % TILES * ACROSS + tl.arange(0, ACROSS)
    channel = tl.program_id(0) // TILES % PARTS * CHANNELS + tl.arange(0, CHANNELS)
    real, wanted = pixel < PIXELS, channel < OUTSIDE
    batch, row, column = _pixel(pixel, OUT, POOLED)
    x += client * (BATCH * INSIDE * SIDE * SIDE)
    weight += client * (OUTSIDE * PATCH)
    total = _zeros(CHANNELS, ACROSS, MODE, TURNED)
    for start in range(0, PATCH, INNER):
        number = start + tl.arange(0, INNER)
        tap_channel, tap_row, tap_column = _tap(number, INSIDE, KERNEL, READS)
        patches = _patches(
            x, tap_channel, tap_row, tap_column, number < PATCH, batch, row, column, real,
            INSIDE, SIDE, PADDING, READS,
        )  # fmt: skip
        weights = tl.load(
            weight + channel[:, None] * PATCH + number[None, :],
            mask=wanted[:, None] & (number < PATCH)[None, :],
            other=0.0,
        )
        total = _add_product(weights, patches, total, MODE, TURNED)
    own_bias = tl.load(bias + client * OUTSIDE + channel, mask=wanted, other=0.0)
    if TURNED:
        total = tl.trans(total)
    total += own_bias[:, None]
    if POOLED:
        windows = tl.reshape(total, (CHANNELS, ACROSS // 4, 4))
        value, first = tl.max(windows, axis=2, return_indices=True)
        window = tl.program_id(0) % TILES * (ACROSS // 4) + tl.arange(0, ACROSS // 4)
        batch, row, column = _pixel(window, OUT // 2, False)
        place = client * (BATCH * OUTSIDE * (OUT // 2) * (OUT // 2)) + _place(
            batch[None, :], channel[:, None], row[None, :], column[None, :], OUTSIDE, OUT // 2, INNERMOST
        )
        stored = wanted[:, None] & (window < PIXELS // 4)[None, :]
        tl.store(out + place, tl.maximum(value, 0.0), mask=stored)
        tl.store(winner + place, tl.where(value > 0, first, 4).to(tl.uint8), mask=stored)
    else:
        place = client * (BATCH * OUTSIDE * OUT * OUT) + _place(
            batch[None, :], channel[:, None], row[None, :], column[None, :], OUTSIDE, OUT, INNERMOST
        )
        tl.store(out + place, total, mask=wanted[:, None] & real[None, :])


@triton.jit
def _of_weights(
    x, g, winner, out,
    BATCH: tl.constexpr, INSIDE: tl.constexpr, SIDE: tl.constexpr, OUTSIDE: tl.constexpr, OUT: tl.constexpr,
    KERNEL: tl.constexpr, PADDING: tl.constexpr, POOLED: tl.constexpr, READS: tl.constexpr,
    INNERMOST: tl.constexpr, MODE: tl.constexpr, CHANNELS: tl.constexpr, ACROSS: tl.constexpr,
    INNER: tl.constexpr, TURNED: tl.constexpr,
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
    tap_channel, tap_row, tap_column = _tap(number, INSIDE, KERNEL, READS)
    results: tl.constexpr = BATCH * OUTSIDE * (OUT * OUT // 4 if POOLED else OUT * OUT)
    x += client * (BATCH * INSIDE * SIDE * SIDE)
    g += client * results
    winner += client * results
    total = _zeros(CHANNELS, ACROSS, MODE, TURNED)
    for start in range(0, SPAN, INNER):
        pixel = split * SPAN + start + tl.arange(0, INNER)
        real = pixel < PIXELS
        batch, row, column = _pixel(pixel, OUT, POOLED)
        gradients = _gradients(
            g, winner, channel[:, None], row[None, :], column[None, :], batch[None, :],
            wanted[:, None] & real[None, :], OUTSIDE, OUT, POOLED, INNERMOST,
        )  # fmt: skip
        patches = _patches(
            x, tap_channel, tap_row, tap_column, number < PATCH, batch, row, column, real,
            INSIDE, SIDE, PADDING, READS,
        )  # fmt: skip
        patches = tl.where((number == PATCH)[:, None], 1.0, patches).to(patches.dtype)
        total = _add_product(gradients, tl.trans(patches), total, MODE, TURNED)
    if TURNED:
        total = tl.trans(total)
    place = (client * SPLITS + split) * (OUTSIDE * (PATCH + 1))
    place += channel[:, None] * (PATCH + 1) + number[None, :]
    tl.store(out + place, total, mask=wanted[:, None] & (number <= PATCH)[None, :])


@triton.jit
def _of_images(
    g, winner, weight, out,
    BATCH: tl.constexpr, INSIDE: tl.constexpr, SIDE: tl.constexpr, OUTSIDE: tl.constexpr, OUT: tl.constexpr,
    KERNEL: tl.constexpr, PADDING: tl.constexpr, POOLED: tl.constexpr, READS: tl.constexpr,
    INNERMOST: tl.constexpr, MODE: tl.constexpr, CHANNELS: tl.constexpr, ACROSS: tl.constexpr,
    INNER: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The gradient of the images: every pixel gathers from the results it had a part in."""
    PIXELS: tl.constexpr = BATCH * SIDE * SIDE
    TAPS: tl.constexpr = KERNEL * KERNEL
    TILES: tl.constexpr = (PIXELS + ACROSS - 1) // ACROSS
    PARTS: tl.constexpr = (INSIDE + CHANNELS - 1) // CHANNELS
    client = (tl.program_id(0) // (TILES * PARTS)).to(tl.int64)
    pixel = tl.program_id(0) % TILES * ACROSS + tl.arange(0, ACROSS)
    channel = tl.program_id(0) // TILES % PARTS * CHANNELS + tl.arange(0, CHANNELS)
    real, wanted = pixel < PIXELS, channel < INSIDE
    batch, row, column = _pixel(pixel, SIDE, False)
    results: tl.constexpr = BATCH * OUTSIDE * (OUT * OUT // 4 if POOLED else OUT * OUT)
    g += client * results
    winner += client * results
    weight += client * (OUTSIDE * INSIDE * TAPS)
    total = _zeros(CHANNELS, ACROSS, MODE, TURNED)
    for start in range(0, OUTSIDE * TAPS, INNER):
        number = start + tl.arange(0, INNER)
        some = number < OUTSIDE * TAPS
        source, tap_row, tap_column = _tap(number, OUTSIDE, KERNEL, INNERMOST)
        y = (row + PADDING)[None, :] - tap_row[:, None]
        z = (column + PADDING)[None, :] - tap_column[:, None]
        inside = some[:, None] & real[None, :] & (y >= 0) & (y < OUT) & (z >= 0) & (z < OUT)
        gradients = _gradients(
            g, winner, source[:, None], y, z, batch[None, :], inside, OUTSIDE, OUT, POOLED, INNERMOST
        )
        if INNERMOST:  # weights lie as [inside, row, column, outside]
            place = channel[:, None] * (OUTSIDE * TAPS) + number[None, :]
        else:
            place = channel[:, None] * TAPS + (source * (INSIDE * TAPS) + number % TAPS)[None, :]
        weights = tl.load(weight + place, mask=wanted[:, None] & some[None, :], other=0.0)
        total = _add_product(weights, gradients, total, MODE, TURNED)
    if TURNED:
        total = tl.trans(total)
    place = client * (BATCH * INSIDE * SIDE * SIDE) + _place(
        batch[None, :], channel[:, None], row[None, :], column[None, :], INSIDE, SIDE, READS
    )
    tl.store(out + place, total, mask=wanted[:, None] & real[None, :])


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


def constants(kind: Kind, choice: Choice) -> dict[str, object]:
    """What a kernel is compiled for."""
    shape, blocks = choice.shape, choice.blocks[kind]
    mode = "rounded" if INTERPRETED and choice.mode == "bf16" else choice.mode
    found: dict[str, object] = {
        "BATCH": shape.batch, "INSIDE": shape.inside, "SIDE": shape.side, "OUTSIDE": shape.outside,
        "OUT": shape.out, "KERNEL": shape.kernel, "PADDING": shape.padding, "POOLED": shape.pooled,
        "READS": choice.reads_innermost, "INNERMOST": choice.innermost, "MODE": mode,
        "CHANNELS": blocks.channels, "ACROSS": blocks.across, "INNER": blocks.inner, "TURNED": blocks.turned,
    }  # fmt: skip
    return found | ({"SPLITS": blocks.splits} if kind == "weights" else {})


def programs(kind: Kind, shape: Shape, blocks: Blocks) -> int:
    """Return how many programs one client needs."""
    channels = shape.inside if kind == "images" else shape.outside
    across = {
        "forward": shape.batch * shape.out**2,
        "weights": shape.patch + 1,
        "images": shape.batch * shape.side**2,
    }[kind]
    splits = blocks.splits if kind == "weights" else 1
    return triton.cdiv(channels, blocks.channels) * triton.cdiv(across, blocks.across) * splits


def _launch(kind: Kind, choice: Choice, *tensors: Tensor) -> None:
    blocks = choice.blocks[kind]
    grid = (tensors[0].shape[0] * programs(kind, choice.shape, blocks),)
    settings = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    KERNELS[kind][grid](*tensors, **constants(kind, choice), **settings)


def new_images(
    like: Tensor, shape: tuple[int, ...], innermost: bool, dtype: torch.dtype | None = None
) -> Tensor:
    """Return new images [n, batch, channels, h, w], with channels innermost in memory if asked for."""
    n, batch, channels, *sides = shape
    dtype = dtype or like.dtype
    if innermost:
        return like.new_empty(n, batch, *sides, channels, dtype=dtype).movedim(-1, 2)
    return like.new_empty(shape, dtype=dtype)


def arranged(images: Tensor, innermost: bool) -> Tensor:
    """Return images as the kernels read them; no copy if they lie so already."""
    return images.movedim(2, -1).contiguous().movedim(-1, 2) if innermost else images.contiguous()


def forward(x: Tensor, weight: Tensor, bias: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """Return the results [n, ...] and, with pooling, which pixel of each window won (otherwise the results
    once more). Images are given as `arranged` returns them, weights and biases contiguous."""
    whole = (len(x), *choice.shape.result)
    out = new_images(x, whole, choice.innermost)
    winner = new_images(x, whole, choice.innermost, torch.uint8) if choice.shape.pooled else out
    weight = weight.movedim(2, -1).contiguous() if choice.reads_innermost else weight
    _launch("forward", choice, x, weight, bias, out, winner)
    return out, winner


def of_weights(x: Tensor, g: Tensor, winner: Tensor, choice: Choice) -> Tensor:
    """Return the gradients of weights and biases as one tensor [n, outside, patch + 1], for `parted`."""
    splits = choice.blocks["weights"].splits
    out = x.new_empty(len(x), splits, choice.shape.outside, choice.shape.patch + 1)
    _launch("weights", choice, x, g, winner, out)
    if splits == 1:
        return out[:, 0]
    whole, size = torch.empty_like(out[:, 0]), out[0, 0].numel()
    _add_parts[(len(x) * triton.cdiv(size, 1024),)](out, whole, size, splits, 1024)
    return whole


def parted(whole: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """Return views of the gradients of weights and of biases."""
    sides, weight = (choice.shape.kernel, choice.shape.kernel), whole[..., :-1]
    if choice.reads_innermost:
        return weight.unflatten(2, (*sides, choice.shape.inside)).movedim(-1, 2), whole[..., -1]
    return weight.unflatten(2, (choice.shape.inside, *sides)), whole[..., -1]


def of_images(g: Tensor, winner: Tensor, weight: Tensor, choice: Choice) -> Tensor:
    """Return the gradient of the images."""
    out = new_images(g, (len(g), *choice.shape.images), choice.reads_innermost)
    weight = weight.permute(0, 2, 3, 4, 1).contiguous() if choice.innermost else weight
    _launch("images", choice, g, winner, weight, out)
    return out
