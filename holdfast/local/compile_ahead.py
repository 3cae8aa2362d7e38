"""Compile the steps of several programs at the same time, each in a process of its own, which leaves its code
where this process finds it.

These processes get operations and shapes through a pipe from this one, and need no tensors. If one fails or
takes too long, its step is compiled here, as if it had not been tried."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence

import torch

from holdfast.core.device import Precision, deterministic_math
from holdfast.core.own_python import command, variables
from holdfast.local.compiled_code import Operations, Traced, being_compiled, is_known, remember, use_cache

_log = logging.getLogger("holdfast.local")
_LONGEST = 240.0  # seconds that a process may take; more than ten times what FedCAP's networks need
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


Job = tuple[Traced, torch.device, Precision]


def compile_ahead(steps: Sequence[Job], here: int = 1) -> None:
    """Begin to compile these steps, without waiting for them. The first `here` of them are left to this
    process, which would have to wait otherwise, and those whose code is kept are left out."""
    if not steps or use_cache() is None:  # without a folder the code would not be found
        return
    new: dict[str, tuple[Operations, torch.device, Precision]] = {}
    for traced, device, precision in steps:
        step = traced.operations
        if step is not None and step.digest not in being_compiled and not is_known(step, device, precision):
            new[step.digest] = step, device, precision
    others = list(new.values())[here:]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = min(len(others), cores)
    turns = threading.Semaphore(max(1, at_once))
    for job in others:
        being_compiled[job[0].digest] = done = threading.Event()
        threads = max(1, cores // (at_once + 1))
        threading.Thread(target=_in_a_process, args=(job, turns, done, threads), daemon=True).start()


def _in_a_process(
    job: tuple[Operations, torch.device, Precision],
    turns: threading.Semaphore,
    done: threading.Event,
    threads: int,
) -> None:
    try:
        with turns:
            subprocess.run(
                command(__name__, "compile_one"),
                input=pickle.dumps(job),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=variables() | {_THREADS: str(threads)},
                timeout=_LONGEST,
                check=True,
            )
    except Exception as error:  # this process can always do it
        said = getattr(error, "stderr", None) or b""
        why = said.decode(errors="replace").strip().rpartition("\n")[2] or f"{type(error).__name__}: {error}"
        _log.warning("a process that compiles ahead failed (%s); the step is compiled here", why[:300])
    finally:
        done.set()


def compile_one() -> None:
    """In a process of its own: compile what the pipe holds."""
    operations, device, precision = pickle.load(sys.stdin.buffer)
    with deterministic_math(device, precision):
        operations.compiled()
    remember(operations, device, precision)
