from __future__ import annotations

import pytest
import torch
from torch import Tensor

from holdfast.core.keys import Key
from tests.checks.aggregator_cases import apply


def even(n: int) -> Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float64)


def by_covariance(x: Tensor, f: int) -> Tensor:
    """Algorithm 2 with the covariance [d, d] itself."""
    n = len(x)
    c, best, found = [1.0] * n, float("inf"), x.mean(dim=0)
    while sum(c) > n - 2 * f:
        mean = sum(c[i] * x[i] for i in range(n)) / sum(c)
        spread = sum(c[i] * torch.outer(x[i] - mean, x[i] - mean) for i in range(n)) / sum(c)
        values, vectors = torch.linalg.eigh(spread)
        if float(values[-1]) < best:
            best, found = float(values[-1]), mean
        t = [float((x[i] - mean) @ vectors[:, -1]) ** 2 for i in range(n)]
        most = max(t[i] for i in range(n) if c[i] > 0)
        if most == 0:
            break
        c = [c[i] * (1 - t[i] / most) if c[i] > 0 else 0.0 for i in range(n)]
    return found


def test_by_hand() -> None:
    """The mean of 0, 0, 0, 0, 10 is 2, and t is 4, 4, 4, 4, 64: the last client loses all weight, the others
    a sixteenth. 3.75 of 5 are left, which is more than n - 2f = 3, and those spread no more."""
    x = torch.tensor([[0.0], [0.0], [0.0], [0.0], [10.0]], dtype=torch.float64)
    got = apply("caf", x, even(5), f=1)
    assert got.value.tolist() == [0.0] and got.weights.tolist() == [0.25] * 4 + [0.0] and not got.fallback


def test_too_little_weight_is_left_after_a_step() -> None:
    """Of 0, 3, 6 both ends lose all: 1 is left, not more than n - 2f, so the first mean stays."""
    x = torch.tensor([[0.0], [3.0], [6.0]], dtype=torch.float64)
    torch.testing.assert_close(apply("caf", x, even(3), f=1).value, torch.tensor([3.0], dtype=torch.float64))


@pytest.mark.parametrize(("n", "f"), [(3, 1), (7, 0), (7, 3), (12, 4)])
@pytest.mark.parametrize("push", [0.0, 3.0, 1e6])
def test_against_the_covariance_itself(n: int, f: int, push: float) -> None:
    x = Key(4).fold(n).normal(n, 5, dtype=torch.float64)
    x[:f] += push
    torch.testing.assert_close(apply("caf", x, even(n), f=f).value, by_covariance(x, f), rtol=1e-7, atol=1e-7)


def test_a_client_without_weight_does_not_stop_the_filter() -> None:
    """Two attackers at 1e8 and 1e4 in directions of their own: the first is found, then the second."""
    x = Key(2).normal(11, 6, dtype=torch.float64)
    x[3, 0], x[8, 1] = 1e8, 1e4
    got = apply("caf", x, even(11), f=2)
    assert got.weights[3] == 0 and got.weights[8] == 0 and got.value.abs().max() < 1.5


def test_the_error_does_not_grow_with_the_number_of_coordinates() -> None:
    """The claim of the paper and of SMEA's: the error follows the leading eigenvalue of the honest
    covariance, not its trace. Attackers move every coordinate by half a deviation, so by sqrt(d) / 2 in
    all: rules that look at one coordinate at a time follow them more, the more coordinates there are."""
    error = {}
    for d in (10, 1000):
        x = Key(6).fold(d).normal(40, d, dtype=torch.float64)
        x[:10] += 0.5
        honest = x[10:].mean(dim=0)
        for name in ("caf", "median", "trimmed-mean", "meamed"):
            error[name, d] = float((apply(name, x, even(40), f=10).value - honest).norm())
    assert error["caf", 1000] < 2 * error["caf", 10] + 2, error
    for name in ("median", "trimmed-mean", "meamed"):
        assert error[name, 1000] > 5 * error[name, 10], error
