from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from holdfast.core.keys import Key
from tests.checks.aggregator_cases import apply


def even(n: int) -> Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float64)


def spread(x: Tensor) -> float:
    """The leading eigenvalue of the covariance [d, d] itself."""
    return float(torch.linalg.eigvalsh(torch.cov(x.T, correction=0).view(x.shape[1], -1))[-1])


def test_by_hand() -> None:
    """In one dimension the eigenvalue is the variance. Of 0, 1, 3, 10, 11 three of the lowest vary least; of
    1, 4, 7 two pairs vary equally, and the lowest ids win."""
    x = torch.tensor([[0.0], [1.0], [3.0], [10.0], [11.0]], dtype=torch.float64)
    assert apply("smea", x, even(5), f=2).weights.tolist() == [1 / 3, 1 / 3, 1 / 3, 0, 0]
    x = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.float64)
    assert apply("smea", x, even(3), f=1).value.tolist() == [2.5, 3.5, 4.5]


@pytest.mark.parametrize(("n", "f"), [(3, 1), (6, 0), (7, 3), (10, 3)])
def test_against_all_choices(n: int, f: int) -> None:
    x = Key(8).fold(n).normal(n, 4, dtype=torch.float64)
    best = min(combinations(range(n), n - f), key=lambda rows: spread(x[list(rows)]))
    got = apply("smea", x, even(n), f=f)
    assert tuple(got.weights.nonzero().flatten().tolist()) == best and not got.fallback
    torch.testing.assert_close(got.value, x[list(best)].mean(dim=0))


def test_more_choices_than_the_limit_are_not_tried_and_that_is_a_fallback() -> None:
    """20 choose 5 is 15,504. Attackers who all push one way are found one after the other, too."""
    x = Key(9).normal(20, 60, dtype=torch.float64)
    x[[1, 4, 9, 12, 17]] += 2
    got = apply("smea", x, even(20), f=5)
    assert got.fallback and not got.weights[[1, 4, 9, 12, 17]].any()
    assert not apply("smea", x[:8], even(8), f=2).fallback
    assert apply("smea", x[:8], even(8), f=2, limit=27).fallback  # of 28


def test_the_error_follows_the_leading_eigenvalue_not_the_trace() -> None:
    """The claim of the paper: attackers who move each of many coordinates a little are left
    out, while the median and the trimmed mean follow them in every coordinate."""
    x = Key(6).normal(12, 2000, dtype=torch.float64)
    x[:3] += 0.8
    honest = x[3:].mean(dim=0)
    error = {
        name: float((apply(name, x, even(12), f=3).value - honest).norm())
        for name in ("smea", "median", "trimmed-mean")
    }
    assert error["smea"] < 1e-9 and min(error["median"], error["trimmed-mean"]) > 5, error
