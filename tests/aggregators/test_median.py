from __future__ import annotations

import pytest
import torch

from holdfast.aggregators import geometry, ordered
from holdfast.aggregators.trimmed_mean import TrimmedMean
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import build
from tests.checks.aggregator_cases import apply

X = torch.tensor([[1.0, 9.0], [2.0, 0.0], [4.0, 5.0], [100.0, 6.0]], dtype=torch.float64)
W = torch.full((4,), 0.25, dtype=torch.float64)


def test_median_by_hand() -> None:
    got = apply("median", X, W)
    assert got.value.tolist() == [3.0, 5.5] and got.weights.tolist() == [0, 0.25, 0.5, 0.25]
    lower = apply("median", X, W, variant="lower")
    assert lower.value.tolist() == [2.0, 5.0] and lower.weights.tolist() == [0, 0.5, 0.5, 0]
    assert torch.equal(lower.value, X.median(dim=0).values)  # what FedCPA's code calls


def test_trimmed_mean_by_hand() -> None:
    got = apply("trimmed-mean", X, W, f=1)
    assert got.value.tolist() == [3.0, 5.5] and got.weights.tolist() == [0, 0.25, 0.5, 0.25]
    assert apply("trimmed-mean", X, W).value.tolist() == [26.75, 5.0]  # f = 0: the mean
    assert apply("trimmed-mean", X, W, trim=0.25).value.tolist() == [3.0, 5.5]


@pytest.mark.parametrize(
    ("settings", "n", "cut"),
    [({"f": 0.3}, 20, 6), ({"f": 0.3, "trim": 0.15}, 20, 3), ({"f": 2, "trim": 1}, 10, 1)],
)
def test_how_many_are_cut_off(settings: dict, n: int, cut: int) -> None:
    rule = TrimmedMean(**settings)
    assert rule.cut(n, rule.assumed(n)) == cut


def test_a_cut_that_leaves_nothing() -> None:
    with pytest.raises(ConfigError, match="aggregator.trim: a share of 0.5 or more leaves nothing"):
        build("aggregator", {"name": "trimmed-mean", "trim": 0.6})
    assert not TrimmedMean(trim=2).enough(4) and TrimmedMean(trim=2).enough(5)
    assert apply("trimmed-mean", X, W, trim=2).fallback


def test_blocks_of_columns_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = Key(1).normal(6, 50), torch.full((6,), 1 / 6)
    settings = {"median": {}, "trimmed-mean": {"f": 2}, "residual": {}, "bulyan": {}}
    whole = {name: apply(name, x, w, **given) for name, given in settings.items()}
    monkeypatch.setattr(geometry, "BLOCK", 90)
    for name, given in settings.items():
        got = apply(name, x, w, **given)
        torch.testing.assert_close(got.value, whole[name].value)
        torch.testing.assert_close(got.weights, whole[name].weights)


@pytest.mark.parametrize("ties", [False, True])
def test_the_quick_sort_keeps_the_order_of_equal_values(ties: bool) -> None:
    values = Key(1).normal(200, 20)
    values = values.round() if ties else values
    wanted = values.sort(dim=1, stable=True)
    for got in (ordered.sort(values, quick=True), ordered.sort(values, quick=False)):
        assert torch.equal(got[0], wanted.values) and torch.equal(got[1], wanted.indices)
