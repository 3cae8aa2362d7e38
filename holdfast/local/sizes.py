"""Which sizes of a replayed stack are worth their making: rows whose clients have little data finish early, and padding costs as much as
training. Each size is traced and compiled by itself, which takes a while."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_COMPILING = 15.0  # seconds that a size takes to make
_SMALLEST = 8


def worthwhile(sizes: Sequence[int], steps: np.ndarray, microseconds: float, client_steps: float) -> tuple[int, ...]:
    """The given sizes, and halves of the largest that save more time than they take. `steps` are those of typical rows in one training;
    `client_steps` is the number of steps of all rows in the whole run."""
    chosen, largest = set(sizes), max(sizes)
    trainings = client_steps / max(1.0, float(steps.mean()) * largest)
    half = -(-largest // 2)
    while half >= _SMALLEST:
        saved = padded_steps(chosen, largest, steps) - padded_steps({*chosen, half}, largest, steps)
        if saved * trainings * microseconds * 1e-6 > _COMPILING:
            chosen.add(half)
        half = -(-half // 2) if half > 1 else 0
    return tuple(sorted(chosen))


def padded_steps(sizes: set[int], rows: int, steps: np.ndarray) -> int:
    """Row steps that a stack of so many rows takes, those included that padding takes; each row is like one of `steps`."""
    if not steps.size or not steps.max():
        return 0
    at = np.arange(int(steps.max()))
    active = np.ceil(rows * (1.0 - np.searchsorted(np.sort(steps), at, side="right") / steps.size)).astype(np.int64)
    ladder = np.array(sorted(sizes))
    return int(ladder[np.minimum(np.searchsorted(ladder, active), len(ladder) - 1)].sum())
