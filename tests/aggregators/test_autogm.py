from __future__ import annotations

import pytest
import torch
from torch import Tensor

from holdfast.aggregators.autogm import on_the_simplex
from holdfast.core.keys import Key
from tests.aggregators import slow
from tests.checks.aggregator_cases import apply


def even(n: int) -> Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float64)


def slow_shares(far: list[float], strength: float) -> list[float]:
    """max(0, eta - d) / lambda, with eta by bisection."""
    low, high = min(far), max(far) + strength
    for _ in range(200):
        eta = (low + high) / 2
        if sum(max(0.0, eta - d) for d in far) > strength:
            high = eta
        else:
            low = eta
    return [max(0.0, eta - d) / strength for d in far]


def slow_median(x: Tensor, shares: list[float], point: Tensor) -> Tensor:
    for _ in range(60):
        weights = slow.tensor(shares) / (x - point).norm(dim=1).clamp(min=1e-9)
        point = weights @ x / weights.sum()
    return point


def slow_autogm(x: Tensor, strength: float) -> Tensor:
    """Shares and geometric medians in turns, each to its end, with the updates themselves."""
    n = len(x)
    point = slow_median(x, [1 / n] * n, x.mean(dim=0))
    for _ in range(100):
        shares = slow_shares((x - point).norm(dim=1).tolist(), strength)
        point = slow_median(x, shares, point)
    return point


def test_shares_by_hand() -> None:
    """0.5 + 0.3 is 0.2 below 1, so both gain 0.1; a third far below them has none."""
    wanted = torch.tensor([[0.5, 0.3, -1.0], [2.0, 0.0, 0.0], [-1e30, -1e30, -5.0]], dtype=torch.float64)
    expected = torch.tensor([[0.6, 0.4, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(on_the_simplex(wanted), expected)


def test_a_square_with_a_client_far_away() -> None:
    """By symmetry, the centre of the four corners; the fifth has no weight at all, where the geometric median
    alone is drawn towards it."""
    x = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [9.0, 1.0]], dtype=torch.float64)
    got = apply("autogm", x, even(5))
    torch.testing.assert_close(got.value, torch.tensor([1.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(got.weights, torch.tensor([0.25] * 4 + [0.0], dtype=torch.float64))
    assert apply("rfa", x, even(5)).value[0] > 1.1


@pytest.mark.parametrize("push", [0.0, 2.0, 20.0])
def test_against_the_slow_reference(push: float) -> None:
    x = Key(3).normal(9, 6, dtype=torch.float64)
    x[:3] += push
    got = apply("autogm", x, even(9), unit="absolute", regularisation=1.5)
    torch.testing.assert_close(got.value, slow_autogm(x, 1.5 * 9), rtol=1e-4, atol=1e-4)


def test_with_a_large_lambda_it_is_the_geometric_median() -> None:
    x = Key(3).normal(9, 6, dtype=torch.float64)
    x[0] += 10
    got, expected = apply("autogm", x, even(9), regularisation=1e9), apply("rfa", x, even(9))
    torch.testing.assert_close(got.value, expected.value, rtol=1e-5, atol=1e-5)


def test_attackers_move_it_less_than_the_geometric_median() -> None:
    """The claim of the paper: with up to almost half attackers of large updates it errs less than the
    geometric median, because these have no weight, and it needs no number of attackers."""
    for f in (2, 5, 7):
        x = Key(f).normal(16, 50, dtype=torch.float64)
        x[:f] += 10
        honest = x[f:].mean(dim=0)
        error = {name: float((apply(name, x, even(16)).value - honest).norm()) for name in ("autogm", "rfa")}
        assert error["autogm"] < 0.5 * error["rfa"], (f, error)
