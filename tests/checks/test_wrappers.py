"""What every registered wrapper must keep, around every registered rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.aggregators.base import Aggregator, Reduced
from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from tests.checks.aggregator_cases import EXACT, context_of, updates
from tests.helpers import built_in

WRAPPERS, RULES = list(built_in("wrapper")), list(built_in("aggregator"))
REFUSED = {
    (wrapper, rule)
    for wrapper, senseless in {
        "bucketing": {"clients"},
        "foundation": {"clients"},
        "gas": {"clients", "model"},
    }.items()
    for rule in RULES
    if build("aggregator", rule).remembers() in senseless
} | {("gas", rule) for rule in RULES if build("aggregator", rule).in_places}
ASKS = {"err", "lfr"}
"""They ask for tests of models, which no wrapper around them may ask for again, or tear into groups."""
SHOWN_THE_SAME = {"crfl", "err", "weak-dp"}
"""They show a rule just what it sees without them, or what `lfr` or `clip` shows it: a few rules will do."""
PAIRS = [
    (w, r)
    for w in WRAPPERS
    for r in (["mean", "median"] if w in SHOWN_THE_SAME else RULES)
    if (w, r) not in REFUSED
]
every_pair = pytest.mark.parametrize(("wrapper", "rule"), PAIRS)


def wrapped(wrapper: str, rule: str, f: float = 1, **settings: Any) -> Aggregator:
    return build("wrapper", wrapper)(build("aggregator", {"name": rule, "f": f, **settings}))


def apply(rule: Aggregator, x: Tensor, w: Tensor, ids: Tensor | None = None) -> Reduced:
    ctx = context_of(x, ids, rule.assumed(len(x)))
    return rule(x, w, rule.init(ctx.layout), ctx)


@every_pair
@pytest.mark.parametrize("n", [1, 2, 7])
def test_shapes_and_weights(wrapper: str, rule: str, n: int) -> None:
    x, w = updates(n)
    before = x.clone(), w.clone()
    once, again = (apply(wrapped(wrapper, rule), x, w) for _ in range(2))
    assert once.value.shape == (6,) and once.value.dtype == x.dtype and once.weights.shape == (n,)
    assert torch.isfinite(once.value).all() and (once.weights >= 0).all() and isinstance(once.fallback, bool)
    assert torch.equal(once.value, again.value) and torch.equal(once.weights, again.weights)
    assert torch.equal(x, before[0]) and torch.equal(w, before[1])  # pure


@every_pair
def test_the_order_of_clients_does_not_matter(wrapper: str, rule: str) -> None:
    x, w = updates(7)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    here = apply(wrapped(wrapper, rule), x, w)
    there = apply(wrapped(wrapper, rule), x[order], w[order], torch.arange(7)[order])
    torch.testing.assert_close(here.value, there.value, rtol=0, atol=1e-12)
    torch.testing.assert_close(here.weights[order], there.weights, rtol=0, atol=1e-12)


@every_pair
def test_clients_that_agree_are_believed(wrapper: str, rule: str) -> None:
    x = torch.full(
        (5, 6), 0.1, dtype=torch.float64
    )  # as the root update of the context, for rules that go by it
    torch.testing.assert_close(
        apply(
            wrapped(wrapper, rule, **EXACT.get(rule, {})), x, torch.full((5,), 0.2, dtype=torch.float64)
        ).value,
        x[0],
        rtol=0,
        atol=1e-9,
    )


@every_pair
def test_it_says_what_it_is_made_of(wrapper: str, rule: str) -> None:
    inner = build("aggregator", {"name": rule, "f": 1, "weights": "uniform"})
    outer = build("wrapper", wrapper)(inner)
    assert (
        outer.name == f"{wrapper}({rule})"
        and outer.needs == inner.needs | ({"root", "assess"} if wrapper in ASKS else set())
        and outer.weights == "uniform"
        and outer.f == 1
    )
    assert outer.remembers() == inner.remembers() and outer.assumed(10) == 1
    layout = context_of(torch.zeros(1, 6)).layout
    assert outer.init(layout).keys() == inner.init(layout).keys()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("outer", WRAPPERS)
def test_wrappers_nest(wrapper: str, outer: str) -> None:
    if wrapper in ASKS and outer in {*ASKS, "gas"}:
        with pytest.raises(
            ConfigError, match=rf"aggregator.wrap: '{wrapper}.mean.' tests models.*; leave one"
        ):
            build("wrapper", outer)(wrapped(wrapper, "mean"))
        return
    x, w = updates(7)
    nest = build("wrapper", outer)(wrapped(wrapper, "mean"))
    assert nest.name == f"{outer}({wrapper}(mean))" and [one.name for one in nest.layers()[1]] == [
        wrapper,
        outer,
    ]
    assert torch.isfinite(apply(nest, x, w).value).all()


@pytest.mark.parametrize(("wrapper", "rule"), sorted(REFUSED))
def test_senseless_pairs_are_refused(wrapper: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"aggregator.wrap: '{rule}' .* leave '{wrapper}' out"):
        wrapped(wrapper, rule)
