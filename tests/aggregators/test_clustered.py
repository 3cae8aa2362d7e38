from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from holdfast.aggregators.bipartition import two_parts
from holdfast.aggregators.geometry import cosines
from holdfast.core.keys import Key
from tests.aggregators import slow
from tests.checks.aggregator_cases import apply

X = torch.tensor([[1.0, 0.1], [-1.0, 0.0], [1.0, -0.1], [-5.0, 0.1], [2.0, 0.0]], dtype=torch.float64)
W = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2], dtype=torch.float64)


def test_by_hand() -> None:
    got = apply("clustered", X, W)
    torch.testing.assert_close(got.weights, torch.tensor([1, 0, 3, 0, 2], dtype=torch.float64) / 6)
    torch.testing.assert_close(got.value, torch.tensor([8 / 6, -0.2 / 6], dtype=torch.float64))


def test_of_equal_parts_the_one_with_the_lowest_id_stays() -> None:
    got = apply("clustered", X[:4], torch.full((4,), 0.25, dtype=torch.float64), torch.tensor([9, 3, 8, 4]))
    assert got.weights.tolist() == [0, 0.5, 0, 0.5]


def test_the_originals_test_comes_first_where_it_is_set() -> None:
    assert torch.equal(apply("clustered", X, W, mean_below=0.1).weights, W)
    assert torch.equal(apply("clustered", X, W, max_above=6.0).weights, W)
    assert apply("clustered", X, W, mean_below=2.0, max_above=4.0).weights[1] == 0


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("n", [3, 4, 9, 14])
def test_against_the_slow_reference(n: int, complete: bool) -> None:
    for seed in range(5):
        apart = 1 - cosines(Key(seed).normal(n, 5, dtype=torch.float64))
        part = two_parts(apart, complete).nonzero().flatten()
        assert frozenset(part.tolist()) in slow.linkage(apart.tolist(), complete)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_single_linkage_is_the_best_cut(seed: int, ties: bool) -> None:
    n = 7
    alike = cosines(Key(seed).normal(n, 4, dtype=torch.float64))
    alike = (2 * alike).round() if ties else alike

    def across(part: Tensor) -> float:
        return float(alike[part][:, ~part].max())

    cuts = [
        torch.isin(torch.arange(n), torch.tensor(chosen))
        for size in range(1, n)
        for chosen in itertools.combinations(range(n), size)
    ]
    assert across(two_parts(1 - alike, complete=False)) == min(across(cut) for cut in cuts)


def test_a_row_too_long_to_be_squared_has_a_direction() -> None:
    x = torch.cat([X.float(), torch.tensor([[-1e30, 0.0]])])
    assert apply("clustered", x, torch.full((6,), 1 / 6)).weights.gt(0).tolist() == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]


def test_where_all_are_equally_far_the_lowest_ids_stay_together() -> None:
    for n in range(3, 9):
        apart = 1 - torch.eye(n, dtype=torch.float64)
        assert two_parts(apart, complete=False).tolist() == [False] * (n - 1) + [True]
        assert 1 <= int(two_parts(apart, complete=True).sum()) < n
