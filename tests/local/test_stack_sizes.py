"""Sizes of replayed stacks, by hand."""

from __future__ import annotations

import numpy as np

from holdfast.local.stack_sizes import cut, padded_steps, worthwhile


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
    assert worthwhile((160,), steps, 30.0, 1e9) == (
        20,
        40,
        80,
        160,
    )  # 16 rows go on: 10 would be too few for them
    assert worthwhile((40, 160), steps, 30.0, 1e9) == (20, 40, 160)  # with 40 there, 80 saves nothing


def test_halves_are_made_only_where_they_fit() -> None:
    steps = np.array([1] * 90 + [100] * 10)
    assert worthwhile((160,), steps, 30.0, 1e9, held=160 + 80 + 40 + 20) == (20, 40, 80, 160)
    assert worthwhile((160,), steps, 30.0, 1e9, held=160 + 80 + 39) == (20, 80, 160)
    assert worthwhile((160, 160), steps, 30.0, 1e9, held=2 * (160 + 40)) == (
        40,
        160,
    ), "each of two groups has its own of each size"


def test_groups_are_cut_by_hand() -> None:
    assert cut((840, 240), 1024, 10_000) == 840
    assert cut((2520, 720), 1024, 10_000) == 840, "three equal parts; 1024 would leave 472 to be padded"
    assert cut((400, 200, 200), 1024, 800) == 400
    assert cut((400, 200, 200), 1024, 799) == 200, "not all programs fit, so two parts of the largest"
    assert cut((400, 200, 200), 1024, 599) == 134
    assert cut((5, 5), 1024, 0) == 1, "what is too large in any case is left to the device"
