from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.aggregators.rfa import RFA
from holdfast.core.flat import Layout
from holdfast.core.keys import Key
from tests.checks.aggregator_cases import apply, context_of, updates


def test_three_corners_by_hand() -> None:
    """Of an equilateral triangle the geometric median is the centre; of a square with a point inside, that
    point."""
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]], dtype=torch.float64)
    w = torch.full((3,), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(
        apply("rfa", x, w).value, torch.tensor([0.5, 0.75**0.5 / 3], dtype=torch.float64)
    )
    square = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 4.0], [2.0, 2.0]], dtype=torch.float64)
    got = apply("rfa", square, torch.full((5,), 0.2, dtype=torch.float64))
    torch.testing.assert_close(got.value, square[4], rtol=0, atol=1e-6)
    assert got.weights[4] > 0.99


def test_no_point_nearby_is_better() -> None:
    x, w = updates(9)
    got = apply("rfa", x, w, tolerance=1e-12, iterations=1000)
    cost = lambda z: float((w * (x - z).norm(dim=1)).sum())  # noqa: E731
    for step in Key(4).normal(50, 6, dtype=torch.float64) * 1e-3:
        assert cost(got.value) <= cost(got.value + step)
    torch.testing.assert_close(got.weights @ x, got.value)


def step_by_step(
    x: torch.Tensor, w: torch.Tensor, smoothing: float = 1e-6, iterations: int = 100
) -> torch.Tensor:
    """Algorithm 1 as it is written, with the updates themselves in every step."""
    x, w = x.double(), w.double()
    point = w @ x / w.sum()
    for _ in range(iterations):
        beta = w / (x - point).norm(dim=1).clamp(min=smoothing)
        point = beta @ x / beta.sum()
    return point


@pytest.mark.parametrize("far", [1.0, 1e4, 1e9, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_the_updates_themselves(far: float, dtype: torch.dtype) -> None:
    """Also where attackers are so far away that products of updates have no digits left for the others."""
    x, w = (value.to(dtype) for value in updates(11, 40))
    x[[2, 5, 8]] *= far
    got = apply("rfa", x, w, tolerance=0.0)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(got.value.double(), step_by_step(x, w), rtol=tolerance, atol=tolerance)


def test_layer_by_layer() -> None:
    x, w = updates(7, 6)
    layout = Layout.of(nn.Linear(2, 2))  # a weight of 4 numbers and a bias of 2
    ctx = context_of(x)
    ctx = type(ctx)(ctx.ids, ctx.received, layout, ctx.key, 1, 0)
    got = RFA(per_layer=True)(x, w, {}, ctx)
    apart = [apply("rfa", x[:, :4], w), apply("rfa", x[:, 4:], w)]
    assert torch.equal(got.value, torch.cat([part.value for part in apart]))
    torch.testing.assert_close(got.weights, apart[0].weights * 4 / 6 + apart[1].weights * 2 / 6)
