"""Which sizes of a replayed stack are worth their making: rows whose clients have little data finish early,
and padding costs as much as training. Each size is traced and compiled by itself, which takes a while."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_COMPILING = 15.0  # seconds that a size takes to make
_SMALLEST = 8


def cut(groups: Sequence[int], most: int, held: int) -> int:
    """How many rows of these groups train at a time: equal parts of the largest, since the last one is
    padded, of at most `most` rows, and so small that programs for all groups hold no more than `held` rows.
    They keep their memory from round to round; where not all of them fit, every round would make them
    again."""
    largest = max(groups)
    for parts in range(1, largest + 1):
        rows = -(-largest // parts)
        if rows <= most and sum(min(group, rows) for group in groups) <= held:
            return rows
    return 1


def worthwhile(
    groups: Sequence[int], steps: np.ndarray, microseconds: float, client_steps: float, held: float = math.inf
) -> tuple[int, ...]:
    """The sizes of these groups, and halves of the largest that save more time than they take, while all
    programs hold no more than `held` rows. `steps` are those of typical rows in one training; `client_steps`
    is the number of steps of all rows in the whole run."""
    chosen, largest, room = set(groups), max(groups), held - sum(groups)
    trainings = client_steps / max(1.0, float(steps.mean()) * largest)
    half = -(-largest // 2)
    while half >= _SMALLEST:
        saved = padded_steps(chosen, largest, steps) - padded_steps({*chosen, half}, largest, steps)
        more = half * sum(group > half for group in groups)
        if saved * trainings * microseconds * 1e-6 > _COMPILING and more <= room:
            chosen.add(half)
            room -= more
        half = -(-half // 2) if half > 1 else 0
    return tuple(sorted(chosen))


def padded_steps(sizes: set[int], rows: int, steps: np.ndarray) -> int:
    """Row steps that a stack of so many rows takes, those included that padding takes; each row is like one
    of `steps`."""
    if not steps.size or not steps.max():
        return 0
    at = np.arange(int(steps.max()))
    active = np.ceil(rows * (1.0 - np.searchsorted(np.sort(steps), at, side="right") / steps.size)).astype(
        np.int64
    )
    ladder = np.array(sorted(sizes))
    return int(ladder[np.minimum(np.searchsorted(ladder, active), len(ladder) - 1)].sum())
