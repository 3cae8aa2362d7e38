"""Rules that try the clients' models, in wrappers that add or leave out clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from holdfast.aggregators.base import AggregationContext, Reduced
from holdfast.aggregators.mean import Mean
from holdfast.core.types import State
from holdfast.wrappers.foundation import Foundation
from holdfast.wrappers.rejection import of_some
from tests.checks.aggregator_cases import context_of


class Rows:
    """In place of a probe: which of the round's models it is about."""

    def __init__(self, rows: torch.Tensor):
        self.rows = rows

    def only(self, rows: torch.Tensor) -> Rows:
        return Rows(self.rows[rows])


class Watching(Mean):
    def __call__(self, x: Any, w: Any, state: State, ctx: AggregationContext) -> Reduced:
        assert cast(Any, ctx.probe).rows.tolist() == x[:, 0].long().tolist()
        return super().__call__(x, w, state, ctx)


def test_every_update_has_its_own_clients_buffers() -> None:
    x, w = torch.arange(4.0)[:, None].expand(4, 2).clone(), torch.full((4,), 0.25)
    ctx = replace(context_of(x), probe=cast(Any, Rows(torch.arange(4))))
    Foundation().reduce(Watching(), x, w, {}, ctx)
    Foundation().reduce_together(Watching(), x[None], w[None], [{}], [ctx])
    kept = torch.tensor([True, False, True, True])
    assert of_some(Watching(), x[kept], w, {}, ctx, kept).weights.tolist()[1] == 0
