"""Updates and contexts for tests that call an aggregator directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.aggregators import geometry
from holdfast.aggregators.base import AggregationContext, Aggregator, Assess, Assessment, Reduced
from holdfast.core.flat import Layout, Slot
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
    start = torch.zeros(d, dtype=x.dtype)
    return AggregationContext(ids, start, layout, Key(0), 1, assumed, root, assess=assessed_by(root))


def assessed_by(root: Tensor) -> Assess:
    """In place of the server's test: the model of an aggregate is as bad as that is far from the root
    update."""

    def assess(candidates: Callable[[], Sequence[Reduced]]) -> Assessment:
        values = torch.stack([one.value for one in candidates()])
        loss = geometry.norms(values, root.to(values.device)).cpu()
        return Assessment(loss, loss / (1 + loss))

    return assess


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


EXACT: dict[str, dict[str, Any]] = {"flame": {"noise": 0.0}}
"""Settings with which a rule that adds noise adds none."""
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "median": [{"variant": "lower"}],
    "trimmed-mean": [{"trim": 0.4}],
    "multi-krum": [{"variant": "authors"}, {"iterative": True}, {"keep": 3}],
    "rfa": [{"per_layer": True}, {"iterations": 3}, {"tolerance": 1e-8}],
    "norm-bound": [
        {"mode": "drop"},
        {"mode": "drop", "bound": 1e-3},
        {"mode": "keep-smallest", "of": "model"},
        {"bound": 2.0},
    ],
    "centered-clip": [{"iterations": 3, "radius": 0.3}],
    "fltrust": [{"variant": "authors"}],
    "foolsgold": [{"memory": False}, {"divide_by": "nothing"}, {"divide_by": "kept"}],
    "clustered": [{"variant": "authors"}, {"mean_below": 3.0, "max_above": 2.0}],
    "dnc": [{"coordinates": 11}],
    "residual": [{"variant": "authors"}],
    "fedcpa": [{"variant": "authors"}],
    "mda": [{"limit": 0}],
    "monna": [{"reference": "root"}],
    "smea": [{"limit": 1}],
    "lasa": [{"variant": "authors"}],
    "flame": [{"of": "update", "noise": 0.0}],
    "freqfed": [{"of": "update", "low": 1.2}],
    "rflbat": [{"most": 1, "far": 1.5}],
}
"""Settings beside the default ones that take other ways through a rule."""
EVERY_WAY = [
    pytest.param({"name": name, **settings}, id="-".join([name, *map(str, settings.values())]))
    for name in RULES
    for settings in [{}, *VARIANTS.get(name, [])]
]


def experiments(
    n: int, d: int, round: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, list[AggregationContext]]:
    """Updates [4, n, d], weights and contexts of four experiments: other data, clients, keys, start models
    and roots in each. One has a row that is far off, one equal values, and one a large part in common."""
    half = d // 2
    slots = (
        Slot("a", (half,), 0, half, dtype, buffer=False, frozen=False),
        Slot("b", (d - half,), half, d, dtype, buffer=False, frozen=False),
    )
    contexts, updates, weights = [], [], []
    for place in range(4):
        key = Key(place).fold(round)
        x = key.normal(n, d, dtype=torch.float64) * 0.1 + 0.3
        if place == 1:
            x[n // 2] = 1e30
        if place == 2:
            x = (key.hash(n, d) % 3).double()
            x[n // 3] = x[0]
        if place == 3:
            x = x * 1e-4 + 50
        w = key.fold("w").uniform(n, dtype=torch.float64) + 0.5
        ids = key.fold("ids").hash(n + 3).argsort()[:n] * 5 + place
        received, root = key.fold("model").normal(d), key.fold("root").normal(d) + 0.3
        contexts.append(
            AggregationContext(
                ids,
                received.to(dtype),
                Layout(slots),
                key,
                round,
                0,
                root.to(dtype),
                {place: "late"},
                assess=assessed_by(root.to(dtype)),
            )
        )
        updates.append(x.to(dtype))
        weights.append((w / w.sum()).to(dtype))
    return torch.stack(updates), torch.stack(weights), contexts
