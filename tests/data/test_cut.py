from __future__ import annotations

import numpy as np
import pytest

from holdfast.data.windows import cut_windows, place_windows, recordings, take_windows


def test_a_recording_ends_with_its_user_its_label_and_its_time() -> None:
    user = np.array([1, 1, 1, 2, 2, 2, 2, 2])
    label = np.array([0, 0, 1, 1, 1, 1, 1, 1])
    seconds = np.array(
        [0.0, 0.1, 0.2, 0.3, 0.2, 0.2, 1.2, 2.3]
    )  # back at 4, equal at 5, exactly the gap at 6, more at 7
    assert recordings([user, label]).tolist() == [0, 2, 3, 8]
    assert recordings([user, label], seconds, gap=1.0).tolist() == [0, 2, 3, 4, 7, 8]
    assert recordings([user, label], np.array([0.0, np.nan, 2, 2, 2, 2, 2, 2])).tolist() == [0, 1, 2, 3, 8]
    assert recordings([user[:0]]).tolist() == [0] and recordings([user[:1]]).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("bounds", "overlap", "minimum", "wanted"),
    [
        ([0, 10], 0.0, None, [(0, 3), (4, 7)]),
        ([0, 10], 0.0, 2, [(0, 3), (4, 7), (8, 9)]),
        ([0, 10], 0.0, 3, [(0, 3), (4, 7)]),
        ([0, 8], 0.0, 1, [(0, 3), (4, 7)]),  # nothing remains
        ([0, 10], 0.5, None, [(0, 3), (2, 5), (4, 7), (6, 9)]),
        ([0, 10], 0.5, 1, [(0, 3), (2, 5), (4, 7), (6, 9)]),  # rows 8 and 9 are in a window already
        ([0, 9], 0.5, 1, [(0, 3), (2, 5), (4, 7), (6, 8)]),  # row 8 is not
        ([0, 6], 0.99, None, [(0, 3), (1, 4), (2, 5)]),  # one row further at least
        ([0, 3, 8, 9], 0.0, None, [(3, 6)]),
        ([0, 3, 8, 9], 0.0, 1, [(0, 2), (3, 6), (7, 7), (8, 8)]),
        ([0], 0.0, 1, []),
    ],
)
def test_first_and_last_rows_of_windows_of_four(
    bounds: list[int], overlap: float, minimum: int | None, wanted: list[tuple[int, int]]
) -> None:
    first, last = place_windows(np.array(bounds), 4, overlap, minimum)
    assert list(zip(first.tolist(), last.tolist(), strict=True)) == wanted


def test_channels_come_first_and_the_last_row_fills() -> None:
    values = np.arange(12, dtype=np.float32).reshape(6, 2)  # channel 0 even, channel 1 odd
    x = take_windows(values, np.array([0, 4]), np.array([3, 5]), 4)
    assert x.dtype == np.float32 and x.flags.c_contiguous
    assert x.tolist() == [[[0, 2, 4, 6], [1, 3, 5, 7]], [[8, 10, 10, 10], [9, 11, 11, 11]]]
    assert take_windows(values, np.zeros(0, np.int64), np.zeros(0, np.int64), 4).shape == (0, 2, 4)


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.8])
@pytest.mark.parametrize("minimum", [1, 3, 5])
def test_windows_equal_a_slow_loop(overlap: float, minimum: int) -> None:
    rng = np.random.default_rng(0)
    ids, seconds = (
        np.repeat(rng.integers(0, 9, 15), 20),
        np.cumsum(rng.choice([-0.1, 0.1, 0.2, 3.0], 300, p=[0.03, 0.5, 0.44, 0.03])),
    )
    wanted, begin = [], 0
    for row in range(1, 301):
        if row < 300 and ids[row] == ids[row - 1] and 0 <= seconds[row] - seconds[row - 1] <= 1:
            continue
        at, seen = begin, begin
        while at + 5 <= row:
            wanted.append((at, at + 4))
            seen = at + 5
            at += max(1, round(5 * (1 - overlap)))
        if row - at >= minimum and row > seen:
            wanted.append((at, row - 1))
        begin = row
    first, last = place_windows(recordings([ids], seconds), 5, overlap, minimum)
    assert list(zip(first.tolist(), last.tolist(), strict=True)) == wanted and len(wanted) > 10


@pytest.mark.parametrize("rows", [1, 3, 7, 100])  # of a piece: less than a window, more, and all
@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_values_that_come_in_pieces_give_the_same_windows(rows: int, overlap: float) -> None:
    values = np.arange(200, dtype=np.float32).reshape(100, 2)
    first, last = place_windows(np.array([0, 13, 14, 60, 63, 97, 100]), 5, overlap, 2)
    pieces = [values[at : at + rows] for at in range(0, 100, rows)]
    got = list(cut_windows(iter([*pieces[:3], values[:0], *pieces[3:]]), first, last, 5, 30))
    assert np.array_equal(np.concatenate(got), take_windows(values, first, last, 5))
    assert max(map(len, got)) <= 3 and min(map(len, got)) >= 1  # 30 numbers: three windows of [2, 5]


def test_pieces_are_read_to_their_end_and_dropped_when_they_are_cut() -> None:
    read: list[int] = []
    pieces = (read.append(at) or np.full((10, 1), at, dtype=np.float32) for at in range(10))
    first, last = np.array([5, 52]), np.array([8, 55])
    got = [(windows[0, 0].tolist(), len(read)) for windows in cut_windows(pieces, first, last, 4, 1000)]
    assert (
        got == [([0.0] * 4, 1), ([5.0] * 4, 6)] and len(read) == 10
    )  # what follows is looked at too: it may be damaged
