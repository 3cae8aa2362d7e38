from __future__ import annotations

import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from tests.checks.aggregator_cases import apply

EVEN = torch.full((5,), 0.2, dtype=torch.float64)


def test_by_hand() -> None:
    """Signs add up to 3, 1 and 0 of 5; with theta = 2 only the first coordinate keeps its direction."""
    x = torch.tensor([[1, 1, 4], [1, 1, -1], [1, 1, 0], [1, -1, 0], [-1, -1, 0]], dtype=torch.float64)
    got = apply("rlr", x, EVEN)
    torch.testing.assert_close(got.value, torch.tensor([0.6, -0.2, -0.6], dtype=torch.float64))
    assert torch.equal(got.weights, EVEN) and not got.fallback
    assert apply("rlr", x, EVEN, threshold=1).value.tolist() == pytest.approx([0.6, 0.2, -0.6])
    assert apply("rlr", x, EVEN, threshold=4).value.tolist() == pytest.approx([-0.6, -0.2, -0.6])


def test_client_counts_weigh_in_the_mean_but_each_client_has_one_sign() -> None:
    x = torch.tensor([[1.0], [-1.0], [-1.0]], dtype=torch.float64)
    w = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64)
    torch.testing.assert_close(
        apply("rlr", x, w, threshold=1).value, torch.tensor([0.6], dtype=torch.float64)
    )
    torch.testing.assert_close(
        apply("rlr", x, w, threshold=2).value, -torch.tensor([0.6], dtype=torch.float64)
    )


@pytest.mark.parametrize("threshold", [0.2, 0.4, 0.6, 1, 3])
def test_what_counts_as_enough(threshold: float) -> None:
    """theta above f, and at most n - 2f, for this and every larger cohort."""
    for f in range(6):
        rule = build("aggregator", {"name": "rlr", "threshold": threshold})
        meets = [f < rule.theta(n) <= n - 2 * f for n in range(1, 200)]
        least = rule.least(f)
        assert meets == [n >= least for n in range(1, 200)]


def test_a_threshold_that_attackers_reach_by_themselves_is_refused() -> None:
    with pytest.raises(ConfigError, match="rlr needs n >= 2f \\+ theta and theta > f, which no cohort meets"):
        build("aggregator", {"name": "rlr", "f": 4, "threshold": 4})
    with pytest.raises(ConfigError, match="a number of clients is whole"):
        build("aggregator", {"name": "rlr", "threshold": 1.5})
