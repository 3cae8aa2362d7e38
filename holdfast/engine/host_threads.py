"""Threads for the CPU work of many experiments: scattering replies, attacks, aggregation.

While a GPU trains many experiments as one stack, the cores of its host are idle; afterwards one core would
handle the experiments one after the other, and the GPU would wait. No experiment depends on another, so
inside `host_threads` they are handled by several threads. Each of these uses as many PyTorch threads as the
caller, so the bits are the same with and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from holdfast.core.device import PINNED, to_device

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_pool: ThreadPoolExecutor | None = None


@contextmanager
def host_threads(count: int) -> Iterator[None]:
    """Within this context, `each` uses `count` threads; with one it is a plain loop."""
    global _pool
    before = _pool
    if count <= 1:
        _pool = None
        try:
            yield
        finally:
            _pool = before
        return
    with ThreadPoolExecutor(count, thread_name_prefix="holdfast-hand") as _pool:
        try:
            yield
        finally:
            _pool = before


def each(work: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """work(item) for all items, in their order. All calls have ended, with or without an error, when this
    returns or raises the first error."""
    if _pool is None or len(items) < 2:
        return [work(item) for item in items]
    grad = torch.is_grad_enabled()  # PyTorch remembers this for each thread

    def one(item: Item) -> Answer:
        with torch.set_grad_enabled(grad):
            return work(item)

    futures = [_pool.submit(one, item) for item in items]
    wait(futures)
    return [future.result() for future in futures]


def joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The rows of all parts end to end, on a device. They are copied into pinned memory first, by several
    threads. A single part is not copied: one model for a thousand clients stays one."""
    if len(parts) == 1:
        return to_device(parts[0], device)
    if any(part.device.type != "cpu" for part in parts):
        return torch.cat([to_device(part, device) for part in parts])
    ends = list(accumulate(len(part) for part in parts))
    small = sum(part.numel() * part.element_size() for part in parts) <= PINNED
    whole = torch.empty(
        ends[-1], *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=small and device.type == "cuda"
    )
    each(
        lambda piece: whole[piece[1] - len(piece[0]) : piece[1]].copy_(piece[0]),
        list(zip(parts, ends, strict=True)),
    )
    return whole.to(device, non_blocking=True)
