from __future__ import annotations

import pytest
import torch

from holdfast.core.keys import Key
from tests.aggregators import slow
from tests.checks.aggregator_cases import apply


def points(n: int, d: int = 4) -> torch.Tensor:
    return Key(21).fold(n).normal(n, d, dtype=torch.float64)


def even(n: int) -> torch.Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float64)


def test_krum_by_hand() -> None:
    """On a line at 0, 1, 3, 10, 11 with f = 1 each score is the sum over the two nearest: 10, 5, 13, 50,
    65."""
    x = torch.tensor([[0.0], [1.0], [3.0], [10.0], [11.0]], dtype=torch.float64)
    got = apply("krum", x, even(5), f=1)
    assert got.value.tolist() == [1.0] and got.weights.tolist() == [0, 1, 0, 0, 0] and not got.fallback


def test_multi_krum_by_hand() -> None:
    """The four best of 10, 5, 13, 50, 65 are all but the last. Plain distances to the three nearest: 14, 12,
    12, 18, 29."""
    x = torch.tensor([[0.0], [1.0], [3.0], [10.0], [11.0]], dtype=torch.float64)
    assert apply("multi-krum", x, even(5), f=1).value.tolist() == [3.5]
    assert apply("multi-krum", x, even(5), f=1, keep=2).value.tolist() == [0.5]
    authors = apply("multi-krum", x, even(5), f=1, variant="authors", keep=3)
    assert authors.weights.gt(0).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize(("n", "f"), [(3, 0), (7, 2), (11, 3), (12, 4)])
def test_against_the_slow_reference(n: int, f: int) -> None:
    x = points(n)
    d, rows = slow.far(x), list(range(n))
    scores = slow.krum_scores(d, rows, f)
    best = sorted(rows, key=lambda i: scores[i])
    assert torch.equal(apply("krum", x, even(n), f=f).value, x[best[0]])
    torch.testing.assert_close(apply("multi-krum", x, even(n), f=f).value, x[best[: n - f]].mean(dim=0))
    chosen = slow.repeated_krum(x, f, n - f)
    torch.testing.assert_close(
        apply("multi-krum", x, even(n), f=f, iterative=True).value, x[chosen].mean(dim=0)
    )
    plain = slow.krum_scores(d, rows, f, 0.5, n - f - 1)
    winner = min(rows, key=lambda i: plain[i])
    near = sorted(rows, key=lambda j: d[winner][j])[: n - f]
    torch.testing.assert_close(
        apply("multi-krum", x, even(n), f=f, variant="authors").value, x[near].mean(dim=0)
    )
