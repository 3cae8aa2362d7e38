from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.aggregators.clusters import directions_apart
from holdfast.aggregators.majority_cluster import MajorityCluster
from holdfast.core.keys import Key
from holdfast.results.run import Run
from tests.checks.aggregator_cases import apply
from tests.detectors.judging import BACKDOOR, IID, play

X = torch.tensor([[2.0, 0], [2, 0.2], [4, 0], [0, 1], [0, -1]], dtype=torch.float64)
W = torch.full((5,), 0.2, dtype=torch.float64)


def test_by_hand() -> None:
    """The first three point the same way. Lengths are 2, 2.00998, 4, 1 and 1; the median of all is 2."""
    got = apply("flame", X, W, noise=0.0)
    second = 2 / 4.04**0.5
    expected = torch.tensor([1, second, 0.5, 0, 0], dtype=torch.float64) / 3
    torch.testing.assert_close(got.weights, expected)
    torch.testing.assert_close(
        got.value, torch.tensor([(2 + 2 * second + 2) / 3, 0.2 * second / 3], dtype=torch.float64)
    )
    assert not got.fallback


def test_the_noise_is_as_large_as_it_says_and_comes_from_the_key() -> None:
    x = torch.zeros(5, 4000, dtype=torch.float64)
    x[:, :2] = X
    plain, noisy = apply("flame", x, W, noise=0.0), apply("flame", x, W, noise=0.1)
    drawn = (noisy.value - plain.value)[2:]
    assert float(drawn.std()) == pytest.approx(0.2, rel=0.05) and abs(float(drawn.mean())) < 0.02
    assert torch.equal(noisy.value, apply("flame", x, W, noise=0.1).value)
    assert torch.equal(noisy.weights, plain.weights)


def test_directions_of_models_or_of_updates() -> None:
    """Seen from the model sent, the fourth update points the other way; the five models lie close
    together."""
    rows, received = (
        torch.tensor([[1.0, 0]] * 4 + [[-1.0, 0]], dtype=torch.float64),
        torch.tensor([[100.0, 1]]),
    )
    received = received[0].double()
    models = MajorityCluster().apart(rows, received, None)
    updates = MajorityCluster(of="update").apart(rows, received, None)
    assert float(models.max()) < 1e-6 and updates[0, 4] == 2 and updates[0, 1] == 0


def densest_majority(apart: list[list[float]]) -> set[int]:
    """Take away the longest links until no part has more than half of the clients: the last one that had."""
    n, part = len(apart), set(range(len(apart)))
    for length in sorted({apart[i][j] for i in range(n) for j in range(i)}, reverse=True):
        parts, left = [], set(part)
        while left:
            grown, new = set(), {min(left)}
            while new:
                grown |= new
                new = {j for j in left - grown if any(apart[i][j] < length for i in grown)}
            parts.append(grown)
            left -= grown
        largest = max(parts, key=len)
        if len(largest) <= n // 2:
            return part
        part = largest
    return part


@pytest.mark.parametrize("n", [5, 8, 11])
def test_the_choice_against_the_slow_reference(n: int) -> None:
    for seed in range(4):
        apart = directions_apart(Key(seed).normal(n, 4, dtype=torch.float64))
        chosen = MajorityCluster().admitted(apart, torch.arange(n))
        assert set(chosen.nonzero().flatten().tolist()) == densest_majority(apart.tolist())


@pytest.mark.slow
def test_a_backdoor_that_succeeds_against_the_mean_fails(simulate: Callable[..., Run]) -> None:
    """The paper: backdoors fail, and the accuracy stays."""
    plain, safe = (
        simulate(**play(IID, aggregator=rule, attack=BACKDOOR)).final for rule in ("mean", "flame")
    )
    assert plain["attack/asr"] > 0.6 and safe["attack/asr"] < 0.1
    assert safe["accuracy"] > plain["accuracy"] - 0.02
