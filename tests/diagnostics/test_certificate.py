"""The formulas of CRFL's certificate, by hand and by slow references."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from holdfast.core.keys import Key
from holdfast.diagnostics.certificate import Threat, logistic_lipschitz, radius, vote_bounds

VOTES = torch.tensor([[90, 7, 3], [3, 7, 90], [100, 0, 0], [40, 40, 20]])
THREAT = Threat(weights=[0.5], steps=[2.0], lr=0.1, lipschitz=2.0, noise=0.1)


def at_least(k: int, draws: int, p: float) -> float:
    return sum(math.comb(draws, i) * p**i * (1 - p) ** (draws - i) for i in range(k, draws + 1))


def test_exact_bounds_leave_a_sixth_of_alpha_on_each_side_of_each_of_three_classes() -> None:
    lower, upper = vote_bounds(VOTES, 0.06)
    assert at_least(90, 100, float(lower[0])) == pytest.approx(0.01, rel=1e-9)
    assert 1 - at_least(8, 100, float(upper[0])) == pytest.approx(0.01, rel=1e-9)
    assert torch.equal(lower[0], lower[1]) and torch.equal(upper[0], upper[1])  # whatever class it is
    assert at_least(100, 100, float(lower[2])) == pytest.approx(0.01)
    assert float(upper[2]) == pytest.approx(1 - float(lower[2]))  # both together are at most 1
    assert lower[3] < 0.4 < upper[3]
    assert float(vote_bounds(VOTES[:1] * 100, 0.06)[0][0]) > float(lower[0])


def test_the_papers_bounds_by_hand() -> None:
    lower, upper = vote_bounds(VOTES, 0.01, "hoeffding")
    width = math.sqrt(math.log(100) / 200)
    assert lower.tolist() == pytest.approx([0.9 - width, 0.9 - width, 1 - width, 0.4 - width])
    assert upper.tolist() == pytest.approx([0.07 + width, 0.07 + width, width, 0.4 + width])


def test_the_radius_by_hand() -> None:
    """-log(1 - (0.9 - 0.1)^2) = 1.0217; times 0.1^2, over 2 * 1 * 2^2 * (0.5 * 2 * 0.1)^2 = 0.08."""
    lower, upper = (
        torch.tensor([0.81, 0.3], dtype=torch.float64),
        torch.tensor([0.01, 0.3], dtype=torch.float64),
    )
    found = radius(lower, upper, THREAT)
    assert float(found[0]) == pytest.approx(math.sqrt(-math.log(0.36) * 0.01 / 0.08)) and found[1].isnan()
    twice = Threat(weights=[0.5, 0.5], steps=[2.0, 2.0], lr=0.1, lipschitz=2.0, noise=0.1)
    assert float(radius(lower, upper, twice)[0]) == pytest.approx(float(found[0]) / 2)
    scaled = Threat([0.5], [2.0], 0.1, 2.0, scale=10.0, poisoned=0.05, noise=0.1)
    assert float(radius(lower, upper, scaled)[0]) == pytest.approx(float(found[0]) * 2)


def test_every_later_round_forgets_a_part() -> None:
    """2 Phi(1) - 1 = 0.6827, where the noise is as long as the model may be."""
    later = Threat([0.5], [2.0], 0.1, 2.0, noise=0.1, later=[(0.1, 0.1), (0.2, 0.2)])
    assert later.kept() == pytest.approx(0.6826895**2) and THREAT.kept() == 1
    assert later.reach() == pytest.approx(THREAT.reach() * 0.6826895**2)


def gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.outer((w @ x).softmax(0) - y, x)


def test_the_constant_of_logistic_regression_bounds_every_change_of_the_gradient() -> None:
    length, rho, largest = 2.0, 1.5, 0.0
    for turn in range(100):
        key = Key(turn)
        w = key.fold("w").normal(3, 4, dtype=torch.float64)
        w *= rho / w.norm()
        x, other = key.fold("x").normal(2, 4, dtype=torch.float64)
        x, other = x * length / x.norm(), x * length / x.norm() + 0.2 * other
        other *= min(1.0, length / float(other.norm()))
        y, changed = torch.eye(3, dtype=torch.float64)[key.fold("y").hash(2) % 3]
        moved = torch.cat([x - other, y - changed]).norm()
        largest = max(largest, float((gradient(w, x, y) - gradient(w, other, changed)).norm() / moved))
    bound = logistic_lipschitz(length, rho)
    assert 0.5 * bound < largest <= bound
    assert logistic_lipschitz(1.0, 3.0) == pytest.approx(math.hypot(1.5 + math.sqrt(2), 1))
