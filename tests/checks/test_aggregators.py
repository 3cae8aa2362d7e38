"""What every registered aggregator must keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.core.flat import Layout
from holdfast.core.keys import Key
from holdfast.core.registry import build
from tests.helpers import built_in

RULES = list(built_in("aggregator"))
every_rule = pytest.mark.parametrize("name", RULES)


def context_of(x: Tensor, ids: Tensor | None = None, assumed: int = 0) -> AggregationContext:
    n, d = x.shape
    layout = Layout.of(nn.Linear(d, 1, bias=False))
    ids = torch.arange(n) if ids is None else ids
    return AggregationContext(ids, torch.zeros(d, dtype=x.dtype), layout, Key(0), 1, assumed, root=torch.ones(d, dtype=x.dtype) * 0.1)


def updates(n: int, d: int = 6) -> tuple[Tensor, Tensor]:
    x = Key(7).normal(n, d, dtype=torch.float64) * 0.1 + 1
    w = Key(8).uniform(n, dtype=torch.float64) + 0.5
    return x, w / w.sum()


def apply(name: str, x: Tensor, w: Tensor, ids: Tensor | None = None) -> Reduced:
    rule: Aggregator = build("aggregator", name)
    ctx = context_of(x, ids, rule.assumed(len(x)))
    return rule(x, w, rule.init(ctx.layout), ctx)


@every_rule
@pytest.mark.parametrize("n", [1, 2, 7])
def test_shapes_and_weights(name: str, n: int) -> None:
    x, w = updates(n)
    before = x.clone(), w.clone()
    got = apply(name, x, w)
    assert got.value.shape == (6,) and got.value.dtype == x.dtype and got.weights.shape == (n,)
    assert torch.isfinite(got.value).all() and (got.weights >= 0).all()
    assert torch.equal(x, before[0]) and torch.equal(w, before[1])  # pure


@every_rule
def test_the_order_of_clients_does_not_matter(name: str) -> None:
    x, w = updates(7)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    here, there = apply(name, x, w), apply(name, x[order], w[order], torch.arange(7)[order])
    torch.testing.assert_close(here.value, there.value, rtol=0, atol=1e-12)
    torch.testing.assert_close(here.weights[order], there.weights, rtol=0, atol=1e-12)


@every_rule
def test_clients_that_agree_are_believed(name: str) -> None:
    x = torch.full((5, 6), 0.3, dtype=torch.float64)
    torch.testing.assert_close(apply(name, x, torch.full((5,), 0.2, dtype=torch.float64)).value, x[0], rtol=0, atol=1e-9)


@every_rule
def test_the_same_input_gives_the_same_output(name: str) -> None:
    x, w = updates(6)
    assert torch.equal(apply(name, x, w).value, apply(name, x, w).value)


@every_rule
def test_sample_counts_matter_only_where_the_rule_says_so(name: str) -> None:
    x, w = updates(6)
    even = torch.full((6,), 1 / 6, dtype=torch.float64)
    same = torch.allclose(apply(name, x, w).value, apply(name, x, even).value)
    assert same != build("aggregator", name).uses_priors
