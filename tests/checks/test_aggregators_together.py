"""The aggregates of several experiments are the same together as one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from holdfast.aggregators import geometry
from holdfast.aggregators.base import Aggregator, Reduced
from holdfast.core.registry import build
from tests.checks.aggregator_cases import EVERY_WAY, experiments
from tests.checks.test_wrappers import ASKS, PAIRS
from tests.helpers import some_now

ONE_BY_ONE = {"fedcpa", "deepsight"}
"""Rules that do not reduce several experiments together: FedCPA's score compares sets of a hundredth of the
parameters, model by model; DeepSight passes inputs through models."""
ROUNDED = {"rfa": 1e-10}
"""RFA takes distances from products of rows where at least seven of their digits are left."""
MIXED = ROUNDED | {"residual": 1e-8, "caf": 1e-8, "autogm": 1e-8}
"""Wrappers hand on updates that differ in the last digit, and distances to the lines of `residual`, or
between updates with a large part in common, are as small as a millionth of these."""
SETTINGS: dict[str, dict[str, Any]] = {"gas": {"p": 5}}
"""Of wrappers: few groups, so that the groups of `gas` have several coordinates."""
NESTED = [
    pytest.param(
        [{"name": "bucketing", "variant": "authors"}], "multi-krum", id="bucketing-authors(multi-krum)"
    ),
    pytest.param([{"name": "nnm", "f": 0.3}], "median", id="nnm-0.3(median)"),
    *(
        pytest.param(names, rule, id=f"{'('.join(reversed(names))}({rule})")
        for names in (
            ["clip", "clip"],
            ["bucketing", "clip"],
            ["nnm", "clip"],
            ["gas", "clip"],
            ["clip", "bucketing"],
            ["nnm", "bucketing"],
            ["bucketing", "nnm"],
            ["clip", "nnm", "bucketing"],
            ["nnm", "gas"],
        )
        for rule in ("mean", "multi-krum", "rfa")
    ),
]
"""Wrappers from the inside out."""


@pytest.fixture(autouse=True)
def _several_blocks_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "BLOCK", 500)


@pytest.mark.parametrize("settings", some_now(EVERY_WAY))
def test_together_as_one_by_one(settings: dict[str, Any]) -> None:
    rule: Aggregator = build("aggregator", {"f": 1, **settings})
    for n in (1, 2, 7, 12):
        check(rule, n, rule.name not in ONE_BY_ONE)


def check(
    rule: Aggregator,
    n: int,
    must: bool = True,
    d: int = 24,
    which: Sequence[int] = range(4),
    tolerances: Mapping[str, float] = ROUNDED,
) -> None:
    """Two rounds of several experiments: a rule remembers."""
    layout = experiments(n, d, 0)[2][0].layout
    apart = together = [rule.init(layout)] * len(which)
    for turn in range(2):
        x, w, contexts = experiments(n, d, turn)
        x, w = x[[*which]], w[[*which]]
        contexts = [replace(contexts[place], assumed=rule.assumed(n)) for place in which]
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
            same(here, there, tolerances.get(rule.layers()[0].name, 1e-12))
        apart, together = [each.state for each in one_by_one], [each.state for each in at_once]


def same(here: Reduced, there: Reduced, tolerance: float) -> None:
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(here.value, there.value, **close)
    torch.testing.assert_close(here.weights, there.weights, **close)
    torch.testing.assert_close(here.state, there.state, **close)
    assert here.fallback is there.fallback and here.partial is there.partial


def wrapped(wrappers: Sequence[str | dict[str, Any]], inner: str) -> Aggregator:
    rule: Aggregator = build("aggregator", {"name": inner, "f": 1})
    for given in wrappers:
        table = {"name": given, **SETTINGS.get(given, {})} if isinstance(given, str) else given
        rule = build("wrapper", table)(rule)
    return rule


@pytest.mark.parametrize(("wrapper", "rule"), some_now(PAIRS, every=5))
def test_every_wrapper_around_every_rule_together_as_one_by_one(wrapper: str, rule: str) -> None:
    for n in (1, 2, 7):
        check(wrapped([wrapper], rule), n, must=wrapper not in ASKS, tolerances=MIXED)


@pytest.mark.parametrize(("wrappers", "inner"), NESTED)
def test_nested_wrappers_together_as_one_by_one(wrappers: list[str | dict[str, Any]], inner: str) -> None:
    """Without the experiment of equal values: their mixtures are equal but for the last digit, which then
    decides whose the median is."""
    for n in (1, 7, 12):
        check(wrapped(wrappers, inner), n, which=(0, 1, 3), tolerances=MIXED)
