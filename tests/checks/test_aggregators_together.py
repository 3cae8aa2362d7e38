"""The aggregates of several experiments are the same together as one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from holdfast.aggregators import geometry
from holdfast.aggregators.base import Aggregator, Reduced
from holdfast.core.registry import build
from tests.checks.aggregator_cases import EVERY_WAY, experiments
from tests.helpers import built_in

ONE_BY_ONE = {"fedcpa"}
"""Rules that do not reduce several experiments together: FedCPA's score compares sets of a hundredth of the
parameters, model by model."""
ROUNDED = {"rfa": 1e-10}
"""RFA takes distances from products of rows where at least seven of their digits are left."""
WRAPPED = [
    pytest.param([wrapper, *outer], inner, id=f"{wrapper}-{'-'.join(map(str, outer))}({inner})")
    for inner in ("mean", "median", "multi-krum", "trimmed-mean")
    for wrapper in built_in("wrapper")
    for outer in ([], ["clip"])
]


@pytest.fixture(autouse=True)
def _several_blocks_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "BLOCK", 500)


@pytest.mark.parametrize("settings", EVERY_WAY)
def test_together_as_one_by_one(settings: dict[str, Any]) -> None:
    rule: Aggregator = build("aggregator", {"f": 1, **settings})
    for n in (1, 2, 7, 12):
        check(rule, n, rule.name not in ONE_BY_ONE)


def check(rule: Aggregator, n: int, must: bool = True, d: int = 24) -> None:
    """Two rounds of four experiments: a rule remembers."""
    layout = experiments(n, d, 0)[2][0].layout
    apart = together = [rule.init(layout)] * 4
    for turn in range(2):
        x, w, contexts = experiments(n, d, turn)
        contexts = [replace(ctx, assumed=rule.assumed(n)) for ctx in contexts]
        before = x.clone(), w.clone()
        one_by_one = [
            rule(*of) for of in zip(x.clone().unbind(0), w.clone().unbind(0), apart, contexts, strict=True)
        ]
        at_once = rule.together(x, w, together, contexts)
        assert torch.equal(x, before[0]) and torch.equal(w, before[1])
        if at_once is None:
            assert not must
            return
        for here, there in zip(at_once, one_by_one, strict=True):
            same(here, there, ROUNDED.get(rule.name, 1e-12))
        apart, together = [each.state for each in one_by_one], [each.state for each in at_once]


def same(here: Reduced, there: Reduced, tolerance: float) -> None:
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(here.value, there.value, **close)
    torch.testing.assert_close(here.weights, there.weights, **close)
    torch.testing.assert_close(here.state, there.state, **close)
    assert here.fallback is there.fallback and here.partial is there.partial


@pytest.mark.parametrize(("wrappers", "inner"), WRAPPED)
def test_wrapped_rules_together_as_one_by_one(wrappers: list[str], inner: str) -> None:
    rule: Aggregator = build("aggregator", {"name": inner, "f": 1})
    for name in wrappers:
        rule = build("wrapper", {"name": name, **({"p": 5} if name == "gas" else {})})(rule)
    for n in (1, 2, 7, 12):
        check(rule, n)
