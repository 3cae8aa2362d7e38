from __future__ import annotations

import pytest
import torch

from holdfast.aggregators.norm_bound import NormBound
from holdfast.core.errors import ConfigError
from tests.checks.aggregator_cases import apply, context_of
from tests.helpers import tiny

X = torch.tensor([[3.0, 4.0], [0.0, 10.0], [0.0, 1.0]], dtype=torch.float64)  # lengths 5, 10, 1
W = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)


def test_clipped_at_the_median_length() -> None:
    got = apply("norm-bound", X, W)
    assert got.value.tolist() == [1.5, 2 + 1.25 + 0.25] and got.weights.tolist() == [0.5, 0.125, 0.25]
    assert apply("norm-bound", X, W, relative=2.0).value.tolist() == [1.5, 4.75]


def test_clipped_at_a_length() -> None:
    torch.testing.assert_close(
        apply("norm-bound", X, W, bound=2.0).value, torch.tensor([0.6, 0.8 + 0.5 + 0.25], dtype=torch.float64)
    )


def test_dropped() -> None:
    got = apply("norm-bound", X, W, mode="drop")
    torch.testing.assert_close(got.weights, torch.tensor([2, 0, 1], dtype=torch.float64) / 3)
    nobody = apply("norm-bound", X, W, mode="drop", bound=0.5)
    assert nobody.value.tolist() == [0, 0] and nobody.weights.tolist() == [0, 0, 0]


def test_the_smallest_are_kept() -> None:
    got = apply("norm-bound", X, W, mode="keep-smallest", f=1)
    torch.testing.assert_close(got.weights, torch.tensor([2, 0, 1], dtype=torch.float64) / 3)
    ctx = context_of(X, assumed=2)
    ctx = type(ctx)(ctx.ids, torch.tensor([0.0, -10.0], dtype=torch.float64), ctx.layout, ctx.key, 1, 2)
    by_model = NormBound(mode="keep-smallest", of="model")(X, W, {}, ctx)  # models: (3, -6), (0, 0), (0, -9)
    assert by_model.weights.tolist() == [0, 1, 0]


def test_its_condition_depends_on_how_the_bound_is_set() -> None:
    with pytest.raises(ConfigError, match="needs n > f, but a cohort has n = 5 clients with f = 5"):
        tiny(aggregator={"name": "norm-bound", "mode": "keep-smallest", "f": 5}).parts()
    with pytest.raises(ConfigError, match="needs n > 2f, but a cohort has n = 5 clients with f = 3"):
        tiny(aggregator={"name": "norm-bound", "f": 3}).parts()
    assert tiny(aggregator={"name": "norm-bound", "mode": "keep-smallest", "f": 4}).parts()
    with pytest.raises(ConfigError, match="'norm-bound' needs f, the share"):
        tiny(aggregator={"name": "norm-bound", "mode": "keep-smallest"}).parts()
