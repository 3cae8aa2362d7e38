from __future__ import annotations

import torch

from holdfast.aggregators.centered_clip import CenteredClip
from tests.checks.aggregator_cases import context_of

X = torch.tensor([[1.0, 0.0], [0.0, 40.0]], dtype=torch.float64)
W = torch.tensor([0.5, 0.5], dtype=torch.float64)


def test_by_hand() -> None:
    """From zero, the second is shortened to length 10; in the next round the first lies at distance sqrt(0.25
    + 25) from (0.5, 5)."""
    rule = CenteredClip(radius=10)
    first = rule(X, W, {}, context_of(X))
    assert first.value.tolist() == [0.5, 5.0] and first.weights.tolist() == [0.8, 0.2]
    second = rule(X, W, first.state, context_of(X))
    direction = (X[1] - first.value) / (X[1] - first.value).norm() * 10
    torch.testing.assert_close(second.value, first.value + 0.5 * (X[0] - first.value) + 0.5 * direction)
    twice = CenteredClip(radius=10, iterations=2)(X, W, {}, context_of(X))
    torch.testing.assert_close(twice.value, second.value)
    assert torch.equal(twice.state["centre"], twice.value)


def test_an_attacker_moves_it_by_no_more_than_weight_times_radius() -> None:
    x = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1e30, 0.0]])
    got = CenteredClip(radius=3)(x, torch.full((3,), 1 / 3), {}, context_of(x))
    torch.testing.assert_close(got.value, torch.tensor([1.0, 0.0]))
