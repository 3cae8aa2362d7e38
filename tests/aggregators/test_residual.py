from __future__ import annotations

import pytest
import torch

from holdfast.core.keys import Key
from tests.aggregators import slow
from tests.checks.aggregator_cases import apply


@pytest.mark.parametrize("n", [3, 4, 7, 10])
@pytest.mark.parametrize(("variant", "skip"), [("paper", 0), ("authors", 1)])
def test_against_the_slow_reference(n: int, variant: str, skip: int) -> None:
    x = Key(5).fold(n).normal(n, 8, dtype=torch.float64)
    x[1] += 6
    value, weights = slow.residual(x, skip=skip)
    got = apply("residual", x, torch.full((n,), 1 / n, dtype=torch.float64), variant=variant)
    torch.testing.assert_close(got.value, slow.tensor(value))
    torch.testing.assert_close(got.weights, slow.tensor(weights))


def test_evenly_spread_values_are_all_trusted() -> None:
    """On the line itself every residual is 0, nobody loses confidence, and the mean is what is left."""
    x = torch.tensor([[0.0], [3.0], [1.0], [2.0]], dtype=torch.float64)
    got = apply("residual", x, torch.full((4,), 0.25, dtype=torch.float64))
    assert got.value.tolist() == [1.5] and got.weights.tolist() == [0.25] * 4


def test_an_outlier_has_hardly_any_weight() -> None:
    x = torch.cat([Key(5).normal(9, 20), torch.full((1, 20), 40.0)])
    assert apply("residual", x, torch.full((10,), 0.1)).weights[9] < 0.01
