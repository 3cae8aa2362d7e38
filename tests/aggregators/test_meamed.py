from __future__ import annotations

import statistics

import pytest
import torch

from holdfast.core.keys import Key
from tests.aggregators import slow
from tests.checks.aggregator_cases import apply


def even(n: int) -> torch.Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float64)


def test_by_hand() -> None:
    """0, 1, 5, 6, 7 lie 5, 4, 0, 1, 2 from their median 5: without the farthest the mean is 19 / 4. In the
    second column 0 and 10 lie equally far from 5, and the lower one counts."""
    x = torch.tensor([[0.0, 0], [1, 10], [5, 5], [6, 5], [7, 5]], dtype=torch.float64)
    got = apply("meamed", x, even(5), f=1)
    assert got.value.tolist() == [19 / 4, 15 / 4] and not got.fallback
    assert got.weights.tolist() == [1 / 8, 1 / 8, 2 / 8, 2 / 8, 2 / 8]


@pytest.mark.parametrize(("n", "f"), [(3, 1), (7, 2), (12, 5)])
def test_against_the_slow_reference(n: int, f: int) -> None:
    x = Key(21).fold(n).normal(n, 4, dtype=torch.float64)
    expected = []
    for column in x.T.tolist():
        middle = statistics.median(column)
        expected.append(statistics.mean(sorted(column, key=lambda v: abs(v - middle))[: n - f]))
    torch.testing.assert_close(apply("meamed", x, even(n), f=f).value, slow.tensor(expected))


def test_each_coordinate_may_have_other_attackers() -> None:
    """The claim of Xie et al. (dimensional resilience): every update is wrong somewhere, which no choice of
    whole updates survives, but only two of nine values are wrong in each coordinate."""
    x = 1 + 0.01 * Key(3).normal(9, 9, dtype=torch.float64)
    for column in range(9):
        x[[column, (column + 4) % 9], column] = 1e6
    assert (apply("meamed", x, even(9), f=2).value - 1).abs().max() < 0.02
    assert all(apply(name, x, even(9), f=2).value.max() > 1e5 for name in ("krum", "multi-krum", "mda"))
