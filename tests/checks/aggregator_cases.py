"""Updates and contexts for tests that call an aggregator directly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.core.flat import Layout
from holdfast.core.keys import Key
from holdfast.core.registry import build
from tests.helpers import built_in

RULES = list(built_in("aggregator"))


def context_of(
    x: Tensor, ids: Tensor | None = None, assumed: int = 0, root: Tensor | None = None
) -> AggregationContext:
    n, d = x.shape
    layout = Layout.of(nn.Linear(d, 1, bias=False))
    ids = torch.arange(n) if ids is None else ids
    root = x.mean(dim=0) if root is None else root
    return AggregationContext(ids, torch.zeros(d, dtype=x.dtype), layout, Key(0), 1, assumed, root)


def updates(n: int, d: int = 6) -> tuple[Tensor, Tensor]:
    x = Key(7).normal(n, d, dtype=torch.float64) * 0.1 + 1
    w = Key(8).uniform(n, dtype=torch.float64) + 0.5
    return x, w / w.sum()


def apply(
    name: str, x: Tensor, w: Tensor, ids: Tensor | None = None, root: Tensor | None = None, **settings: Any
) -> Reduced:
    rule: Aggregator = build("aggregator", {"name": name, **settings})
    ctx = context_of(x, ids, rule.assumed(len(x)), root)
    return rule(x, w, rule.init(ctx.layout), ctx)
