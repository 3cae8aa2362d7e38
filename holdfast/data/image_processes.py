"""Decode many images in processes of their own, one for each core. Small images are decoded by Python more
than by Pillow, so threads would wait for each other.

The processes get images through pipes from this one and answer with pixels. What one of them cannot decode is
decoded here, which raises the error; so is everything where none can be started."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np

from holdfast.core.own_python import command, variables
from holdfast.data.decode_image import ImageDecoder, Place

Block = tuple[list[Any], Place]
"""Some encoded images, and where they come from."""
_WORTH = 2.0  # seconds of decoding from which processes are worth their start, of about half a second
_MOST = 16  # processes; this one passes on their bytes, and can serve no more


def decoded(decoder: ImageDecoder, blocks: Iterator[Block], count: int) -> Iterator[np.ndarray]:
    """Yield the pixels of all blocks, in order. The first block tells how long all `count` images take."""
    first = next(blocks, None)
    if first is None:
        return
    began = time.perf_counter()
    pixels = decoder(*first)
    left = (time.perf_counter() - began) * (count - len(pixels)) / len(pixels)
    yield pixels
    processes = min(_cores(), _MOST) if left > _WORTH else 1
    if processes == 1:
        yield from (decoder(*block) for block in blocks)
    else:
        yield from _in_processes(decoder, blocks, processes)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_processes(decoder: ImageDecoder, blocks: Iterable[Block], count: int) -> Iterator[np.ndarray]:
    with contextlib.ExitStack() as stack:
        free: SimpleQueue[_Process] = SimpleQueue()
        for _ in range(count):
            free.put(stack.enter_context(_Process(decoder)))
        threads = stack.enter_context(ThreadPoolExecutor(count))
        waiting: deque[tuple[Block, Future[np.ndarray | None]]] = deque()

        def oldest() -> np.ndarray:
            block, answer = waiting.popleft()
            pixels = answer.result()
            return decoder(*block) if pixels is None else pixels

        for block in blocks:
            waiting.append((block, threads.submit(_answer, free, block[0])))
            if len(waiting) >= 2 * count:  # as many as keep all processes busy
                yield oldest()
        while waiting:
            yield oldest()


def _answer(free: SimpleQueue[_Process], items: list[Any]) -> np.ndarray | None:
    process = free.get()
    try:
        return process.decode(items)
    finally:
        free.put(process)


class _Process:
    """A process that decodes; one that has failed answers nothing."""

    def __init__(self, decoder: ImageDecoder):
        self.pipe: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self.pipe = subprocess.Popen(
                command(__name__, "decode_for_another"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=variables(),
            )
            self._send(decoder)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pipe is not None:
            self.pipe.kill()
            self.pipe.communicate()

    def decode(self, items: list[Any]) -> np.ndarray | None:
        if self.pipe is None or self.pipe.stdout is None:
            return None
        try:
            self._send(items)
            answer: np.ndarray | None = pickle.load(self.pipe.stdout)
            return answer
        except (OSError, EOFError, pickle.UnpicklingError):
            self.__exit__()
            self.pipe = None
            return None

    def _send(self, thing: Any) -> None:
        if self.pipe is not None and self.pipe.stdin is not None:
            pickle.dump(thing, self.pipe.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self.pipe.stdin.flush()


def decode_for_another() -> None:
    """In a process of its own: answer with pixels, or with None where an image cannot be decoded."""
    warnings.simplefilter("ignore")
    decoder: ImageDecoder = pickle.load(sys.stdin.buffer)
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            items = pickle.load(sys.stdin.buffer)
            try:
                pixels = decoder(items, str)
            except Exception:  # the process that asked finds the same, and says where
                pixels = None
            pickle.dump(pixels, sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
            sys.stdout.buffer.flush()
