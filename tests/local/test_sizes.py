"""Sizes of replayed stacks, by hand."""

from __future__ import annotations

import numpy as np

from holdfast.local.sizes import padded_steps, worthwhile


def test_padded_steps_by_hand() -> None:
    steps = np.array([1, 1, 2, 8])
    assert padded_steps({4}, 4, steps) == 8 * 4
    # step 0: 4 rows; step 1: 2 rows; steps 2 to 7: 1 row
    assert padded_steps({2, 4}, 4, steps) == 4 + 2 + 6 * 2
    assert padded_steps({1, 2, 4}, 4, steps) == 4 + 2 + 6 * 1
    assert padded_steps({40}, 40, np.array([0, 0])) == 0


def test_equal_clients_need_one_size() -> None:
    assert worthwhile((100,), np.full(20, 50), 30.0, 1e9) == (100,)


def test_ragged_clients_get_halves_only_where_the_run_is_long() -> None:
    steps = np.array([1] * 90 + [100] * 10)
    assert worthwhile((160,), steps, 30.0, 1e3) == (160,)
    assert worthwhile((160,), steps, 30.0, 1e9) == (20, 40, 80, 160)  # 16 rows go on: 10 would be too few for them
    assert worthwhile((40, 160), steps, 30.0, 1e9) == (20, 40, 160)  # with 40 there, 80 saves nothing
