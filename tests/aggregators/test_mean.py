from __future__ import annotations

import pytest
import torch

from holdfast.aggregators.base import Aggregator
from holdfast.aggregators.mean import Mean
from tests.checks.aggregator_cases import context_of


def test_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 1.0]])
    w = torch.tensor([0.5, 0.25, 0.25])
    out = Mean()(x, w, {}, context_of(x))
    assert (
        out.value.tolist() == [2.5, 2.75]
        and out.weights is w
        and out.state == {}
        and not out.fallback
        and not out.partial
    )


@pytest.mark.parametrize(
    ("f", "n", "assumed"),
    [(None, 10, 0), (0, 10, 0), (2, 10, 2), (0.3, 10, 3), (0.29, 100, 29), (0.57, 100, 57), (0.3, 1, 0)],
)
def test_assumed_attackers(f: float | None, n: int, assumed: int) -> None:
    assert Mean(f=f).assumed(n) == assumed


def test_a_rule_must_say_how_it_aggregates() -> None:
    class Empty(Aggregator):
        """Nothing here."""

    with pytest.raises(TypeError, match="Empty does not define how it aggregates"):
        Empty()(torch.zeros(1, 1), torch.ones(1), {}, context_of(torch.zeros(1, 1)))
