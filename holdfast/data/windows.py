"""Cut sensor rows, in the order in which they were recorded, into windows of equal length.

A window never crosses the end of a recording: a recording ends where the next row has another user or label,
or where its time goes back or jumps. Windows are given by their first and last row, so users and labels are
looked up by row and only the values are copied. Values may come in pieces, so that memory holds only the rows
of the next windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np


def recordings(ids: Sequence[np.ndarray], seconds: np.ndarray | None = None, gap: float = 1.0) -> np.ndarray:
    """Return where recordings begin, followed by the number of rows. `ids` are [rows] arrays (users, labels)
    that do not change within a recording."""
    rows = len(ids[0])
    if not rows:
        return np.zeros(1, dtype=np.int64)
    begins = np.zeros(rows, dtype=bool)
    begins[0] = True
    for column in ids:
        begins[1:] |= column[1:] != column[:-1]
    if seconds is not None:
        step = np.diff(seconds)
        begins[1:] |= ~((step >= 0) & (step <= gap))  # a NaN time ends a recording too
    return np.append(np.flatnonzero(begins), rows)


def place_windows(
    bounds: np.ndarray, length: int, overlap: float = 0.0, minimum: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last row of every window, in row order; `bounds` is the result of recordings().

    Neighbouring windows share the fraction `overlap` of their rows. The rest at the end of a recording, from
    where the next window would begin, becomes a shorter window if it has `minimum` rows (default: length, so
    never) and some of them are in no other window.
    """
    step = max(1, round(length * (1 - overlap)))
    minimum = length if minimum is None else minimum
    sizes = np.diff(bounds)
    whole = np.maximum(0, (sizes - length) // step + 1)
    left = sizes - whole * step
    unseen = sizes - np.where(whole > 0, (whole - 1) * step + length, 0)
    count = whole + ((left >= minimum) & (unseen > 0))
    turn = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    first = np.repeat(bounds[:-1], count) + turn * step
    return first, np.minimum(first + length, np.repeat(bounds[1:], count)) - 1


def take_windows(values: np.ndarray, first: np.ndarray, last: np.ndarray, length: int) -> np.ndarray:
    """Return [windows, channels, length] of the [rows, channels] values; a window that ends early repeats its
    last row."""
    rows = np.minimum(first[:, None] + np.arange(length), last[:, None])
    return np.ascontiguousarray(values[rows].transpose(0, 2, 1))


def cut_windows(
    pieces: Iterable[np.ndarray], first: np.ndarray, last: np.ndarray, length: int, numbers: int
) -> Iterator[np.ndarray]:
    """Yield the windows of values that come in pieces [some rows, channels], in order, about `numbers`
    numbers at a time."""
    held, begin, done = None, 0, 0  # the rows from `begin` on, and the number of windows already cut
    for piece in pieces:
        held = piece if held is None or not len(held) else np.concatenate([held, piece])
        ready, at_once = (
            int(np.searchsorted(last, begin + len(held))),
            max(1, numbers // (held.shape[1] * length)),
        )
        for at in range(done, ready, at_once):
            now = slice(at, min(at + at_once, ready))
            yield take_windows(held, first[now] - begin, last[now] - begin, length)
        done = ready
        spent = min(int(first[done]) - begin, len(held)) if done < len(first) else len(held)
        held, begin = held[spent:], begin + spent
