from __future__ import annotations

import pytest
import torch

from holdfast.core.keys import Key
from tests.aggregators import slow
from tests.checks.aggregator_cases import apply


def test_a_lie_in_one_coordinate_is_cut_off() -> None:
    """Seven on a line, f = 1: repeated Krum leaves out the two farthest, and of five values the three around
    the median are averaged."""
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [20.0], [50.0]], dtype=torch.float64)
    got = apply("bulyan", x, torch.full((7,), 1 / 7, dtype=torch.float64), f=1)
    assert got.value.tolist() == [2.0] and got.weights.gt(0).tolist() == [
        False,
        True,
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(("n", "f"), [(3, 0), (7, 1), (11, 2), (16, 3)])
def test_against_the_slow_reference(n: int, f: int) -> None:
    x = Key(21).fold(n).normal(n, 4, dtype=torch.float64)
    got = apply("bulyan", x, torch.full((n,), 1 / n, dtype=torch.float64), f=f)
    torch.testing.assert_close(got.value, slow.tensor(slow.bulyan(x, f)))
    assert got.weights.count_nonzero() <= n - 2 * f and abs(float(got.weights.sum()) - 1) < 1e-12
