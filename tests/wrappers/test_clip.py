from __future__ import annotations

import torch

from holdfast.wrappers.clip import Clip
from tests.checks.aggregator_cases import context_of
from tests.wrappers.recording_aggregator import Look

X = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0], [0.0, -2.0]])  # norms 5, 1, 0, 2: the median is 1.5
EVEN = torch.full((4,), 0.25)


def clipped(wrapper: Clip, x: torch.Tensor) -> torch.Tensor:
    look = Look(seen=[])
    found = wrapper(look)(x, EVEN[: len(x)], {}, context_of(x))
    assert found.weights.tolist() == [1.0] + [0.0] * (len(x) - 1)
    return look.seen[0][0]


def test_by_hand() -> None:
    torch.testing.assert_close(
        clipped(Clip(), X), torch.tensor([[0.9, 1.2], [0.0, 1.0], [0.0, 0.0], [0.0, -1.5]])
    )
    torch.testing.assert_close(
        clipped(Clip(norm=2.0), X), torch.tensor([[1.8, 2.4], [0.0, 1.0], [0.0, 0.0], [0.0, -2.0]])
    )
    torch.testing.assert_close(
        clipped(Clip(norm=0.5, unit="absolute"), X),
        torch.tensor([[0.3, 0.4], [0.0, 0.5], [0.0, 0.0], [0.0, -0.5]]),
    )
    assert torch.equal(clipped(Clip(norm=5.0, unit="absolute"), X), X)


def test_absurd_lengths_and_no_lengths() -> None:
    huge = torch.tensor([[1e30, 1e30], [0.0, 1.0], [1.0, 0.0]])
    torch.testing.assert_close(
        clipped(Clip(), huge), torch.tensor([[0.5**0.5, 0.5**0.5], [0.0, 1.0], [1.0, 0.0]])
    )
    assert torch.equal(clipped(Clip(), torch.zeros(3, 2)), torch.zeros(3, 2))
