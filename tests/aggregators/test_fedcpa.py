from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast.aggregators import critical
from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.critical import agreement, critical_sets, extreme, spans_of
from holdfast.aggregators.fedcpa import FedCPA
from holdfast.aggregators.normality import weights_of
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout, Slot, Wire
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.types import State, Uplink
from holdfast.methods.context import Context
from holdfast.results.run import Run
from tests.aggregators import slow_fedcpa as slow
from tests.checks.aggregator_cases import context_of

FLOAT = torch.float64


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=FLOAT)


def reduced(
    rule: FedCPA, x: Tensor, state: State | None = None, received: Tensor | None = None, **ctx: Any
) -> Reduced:
    context = replace(context_of(x), received=torch.zeros_like(x[0]) if received is None else received, **ctx)
    return rule(x, torch.full((len(x),), 1 / len(x), dtype=x.dtype), state or {}, context)


def random_round(seed: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Updates with a common part, the model sent, and the one sent before."""
    key = Key(seed)
    x = key.fold("own").normal(n, d, dtype=FLOAT) + key.fold("common").normal(d, dtype=FLOAT)
    return x, key.fold("received").normal(d, dtype=FLOAT), key.fold("before").normal(d, dtype=FLOAT)


# ---- by hand

X = rows([1, 2, 3, 4], [2, 1, 3, 4], [4, 3, 2, 1])
"""From a model of zeros the importances are squares. Top twos: {2, 3}, {2, 3}, {0, 1}; bottom twos: {0, 1},
{0, 1}, {2, 3}. sim(0, 1) = J 1 + rho 1 (both rank 2 below 3) + J 1 + rho 0 (they rank 0 and 1 the other way
round) = 3; to client 2 nothing is in common: 0 + 0.5 + 0 + 0.5 = 1. Normality: (4 + 3 + 1) / 3 twice, (4 + 1
+ 1) / 3."""


def test_four_parameters_by_hand() -> None:
    got = reduced(FedCPA(k=0.5), X)
    assert (
        got.weights.tolist() == [0.5, 0.5, 0] and got.value.tolist() == [1.5, 1.5, 3, 4] and not got.fallback
    )
    assert got.state["model"].tolist() == [0, 0, 0, 0]


def test_the_last_change_of_the_model_by_hand() -> None:
    """The model went from (0, 0, 0, 0) to (4, 3, 2, 1) = G: with the received model added the importances are
    |x (x + G)|. 0: 5, 10, 15, 20; 1: 12, 4, 15, 20; 2: 32, 18, 8, 2; G itself: 16, 9, 4, 1, ranked as client
    2 ranks."""
    g = rows([4, 3, 2, 1])[0]
    before = {"model": torch.zeros(4, dtype=FLOAT)}
    got = reduced(FedCPA(k=0.5), X, before, g)
    # sim(i, G): 1, 1, 4; mean sim to the clients: 8/3, 8/3, 2: client 2 has 6, the others 11/3
    assert (
        got.weights.tolist() == [0, 0, 1]
        and torch.equal(got.value, X[2])
        and torch.equal(got.state["model"], g)
    )
    assert reduced(FedCPA(k=0.5, global_=False), X, before, g).weights.tolist() == [0.5, 0.5, 0]
    assert reduced(FedCPA(k=0.5, local=False), X, before, g).weights.tolist() == [0, 0, 1]


def test_two_parameters_by_hand() -> None:
    """Sets of one: two clients agree in both or in neither, and nothing has a correlation."""
    x = rows([1, 3], [1, 2], [5, 1], [1, 4])
    got = reduced(FedCPA(), x)  # normality: 1 + (2 + 2 + 0 + 2) / 4 three times, 1 + 2 / 4
    torch.testing.assert_close(got.weights, rows([1 / 3, 1 / 3, 0, 1 / 3])[0])
    torch.testing.assert_close(got.value, rows([1, 3])[0])


def test_the_logit_between_nothing_and_all() -> None:
    """Scores 0, 0.5, 0.55, 1: lambda = 0, 0.5, ln(0.55 / 0.45) + 0.5, 1; the sum is divided by three."""
    weights, telling = critical_weights([0.0, 0.5, 0.55, 1.0])
    assert (
        telling
        and weights[[0, 1, 3]].tolist() == [0, 0.5, 1]
        and math.isclose(float(weights[2]), math.log(0.55 / 0.45) + 0.5)
    )
    assert critical_weights([3.0, 3.0 + 1e-12])[0].tolist() == [1, 1]


def critical_weights(scores: list[float]) -> tuple[Tensor, bool]:
    return weights_of(torch.tensor(scores, dtype=FLOAT), torch.ones(len(scores), dtype=torch.bool), 1e-9)


# ---- against the slow reference


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"topk": False},
        {"bottomk": False},
        {"global_": False},
        {"local": False},
        {"correlation": "pearson"},
    ],
)
def test_the_whole_rule_against_the_slow_one(seed: int, options: dict[str, Any]) -> None:
    n, d = 4 + seed, 60 + seed
    x, received, before = random_round(seed, n, d)
    rule = FedCPA(k=0.2, **options)
    got = reduced(rule, x, {"model": before}, received)
    last = ((received - before) * received).abs().tolist() if rule.global_ else None
    scores = slow.normality(
        slow.importances(x, received),
        last,
        int(0.2 * d),
        rule.topk,
        rule.bottomk,
        rule.local,
        corr=slow.pearson if rule.correlation == "pearson" else slow.spearman,
    )
    expected = torch.tensor(slow.weights(scores), dtype=FLOAT)
    torch.testing.assert_close(got.weights, expected / (expected > 0).sum(), rtol=0, atol=1e-9)
    torch.testing.assert_close(got.value, expected @ x / (expected > 0).sum(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("correlation", ["spearman", "pearson"])
@pytest.mark.parametrize("nonzero", [False, True])
@pytest.mark.parametrize("entries", [1, 30, 1 << 18])
def test_ties_zeros_and_blocks(
    correlation: str, nonzero: bool, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importances of few values: most entries are tied, many are zero, sets differ in size, some pairs have
    nothing in common."""
    monkeypatch.setattr(critical, "_ENTRIES", entries)
    for seed in range(6):
        p = (Key(seed).uniform(7, 30, dtype=FLOAT) * (2 + seed)).floor() * (
            Key(seed + 50).uniform(30, dtype=FLOAT) < 0.8
        )
        for sets, largest in zip(critical_sets(p, 8, nonzero), (True, False), strict=True):
            got = agreement(sets, correlation, 0.25)  # type: ignore[arg-type]
            corr = slow.spearman if correlation == "spearman" else slow.pearson
            for i, j in np.ndindex(7, 7):
                expected = (
                    2.0
                    if i == j
                    else slow.alike(p[i].tolist(), p[j].tolist(), 8, largest, corr, 0.25, nonzero)
                )
                assert abs(float(got[i, j]) - expected) < 1e-9, (seed, largest, i, j)


def test_the_slow_one_against_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not needed but to check the reference")
    for seed in range(20):
        a, b = ((Key(seed).fold(name).uniform(12) * 6).floor().tolist() for name in ("a", "b"))
        assert math.isclose(slow.spearman(a, b), stats.spearmanr(a, b).statistic, abs_tol=1e-12)
        assert math.isclose(slow.pearson(a, b), stats.pearsonr(a, b).statistic, abs_tol=1e-12)


@pytest.mark.parametrize("values", ["spread", "few", "zeros", "layered"])
def test_selection_is_that_of_a_full_sort(values: str) -> None:
    """Long enough for the look at a sample; layered: the sample sees nothing of what is extreme."""
    p = Key(3).normal(40_000).abs()
    if values == "few":
        p = (p * 3).floor()
    if values == "zeros":
        p[Key(4).uniform(40_000) < 0.7] = 0
    if values == "layered":
        p[::64] = 1.0
    for k in (1, 40, 400, 20_000):
        top = (-p).argsort(stable=True)[:k]
        bottom = p.argsort(stable=True)[:k]
        for expected, largest in ((top, True), (bottom, False)):
            got = extreme(p, k, largest)
            assert set(got.tolist()) == set(expected.tolist()) and torch.equal(p[got], p[expected])


# ---- which entries are looked at


def test_only_weights_are_compared() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)))
    assert spans_of(layout, 2) == [slice(0, 6), slice(12, 14)]
    assert spans_of(layout, 0) == [slice(0, 15)]
    assert spans_of(layout, 5) == [slice(0, 15)]  # no such tensor: all are looked at
    frozen = replace(layout.slots[0], frozen=True)
    assert spans_of(Layout((frozen, *layout.slots[1:])), 2) == [slice(12, 14)]


def test_biases_change_nothing_but_are_averaged() -> None:
    """The last two columns are a bias: whatever it says, the weights are those of the first four columns."""
    slots = [("weight", (2, 2), 0, 4), ("bias", (2,), 4, 6)]
    layout = Layout(tuple(Slot(*slot, FLOAT, buffer=False, frozen=False) for slot in slots))
    x = torch.cat([X, rows([9, -9], [0, 0], [9, -9])], dim=1)
    got = reduced(FedCPA(k=0.5), x, layout=layout)
    assert got.weights.tolist() == [0.5, 0.5, 0] and got.value.tolist() == [1.5, 1.5, 3, 4, 4.5, -4.5]
    assert not torch.equal(reduced(FedCPA(k=0.5, min_dims=0), x, layout=layout).weights, got.weights)


# ---- edge cases (method card, section h)


def test_equal_scores_are_the_uniform_mean() -> None:
    """Each client has an entry of its own at the top and at the bottom: nobody has anything in common with
    anybody."""
    x = torch.full((3, 6), 2.0, dtype=FLOAT)
    for i in range(3):
        x[i, i], x[i, i + 3] = 5 + i, 0.1
    got = reduced(FedCPA(), x)
    torch.testing.assert_close(got.value, x.mean(dim=0), rtol=0, atol=1e-12)
    assert got.fallback and got.weights.tolist() == [1 / 3] * 3


def test_a_tolerance_leaves_an_honest_cohort_alone() -> None:
    got = reduced(FedCPA(k=0.5, tolerance=1.0), X)  # the scores are 2/3 apart
    torch.testing.assert_close(got.value, X.mean(dim=0), rtol=0, atol=1e-12)
    assert got.fallback and not reduced(FedCPA(k=0.5, tolerance=0.5), X).fallback


@pytest.mark.parametrize("n", [1, 2])
def test_too_few_to_compare_are_averaged(n: int) -> None:
    got = reduced(FedCPA(k=0.5), X[:n], received=X[0])
    torch.testing.assert_close(got.value, X[:n].mean(dim=0), rtol=0, atol=1e-12)
    assert got.fallback and got.weights.tolist() == [1 / n] * n and torch.equal(got.state["model"], X[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_update_is_left_out_before_scoring(bad: float) -> None:
    x = torch.cat([X, rows([1, bad, 0, 0])])
    got = reduced(FedCPA(k=0.5), x)
    assert (
        got.weights.tolist() == [0.5, 0.5, 0, 0]
        and got.value.tolist() == [1.5, 1.5, 3, 4]
        and not got.fallback
    )
    two = reduced(FedCPA(k=0.5), x[[0, 1, 3]])
    assert two.weights.tolist() == [0.5, 0.5, 0] and two.value.tolist() == [1.5, 1.5, 3, 4] and two.fallback
    none = reduced(FedCPA(k=0.5), x[[3, 3, 3]])
    assert none.weights.tolist() == [0, 0, 0] and none.value.tolist() == [0, 0, 0, 0] and none.fallback


def test_no_correlation_may_count_for_nothing() -> None:
    """With 0.5 for what is unknown clients 0 and 1 have 8/3 and client 2 has 2; in sets of one only the
    overlap counts either way."""
    p = rows([1, 2, 3, 4], [4, 3, 2, 1], [1, 2, 3, 4])
    sets = critical_sets(p, 2)[0]
    assert agreement(sets, "spearman", 0.5).tolist() == [[2, 0.5, 2], [0.5, 2, 0.5], [2, 0.5, 2]]
    assert agreement(sets, "spearman", 0.0).tolist() == [[2, 0, 2], [0, 2, 0], [2, 0, 2]]
    flat = critical_sets(rows([1, 1, 1], [1, 2, 3]), 3)[0]
    assert (
        agreement(flat, "spearman", 0.5)[0, 1] == agreement(flat, "pearson", 0.5)[0, 1] == 1.5
    )  # constant: no correlation
    one = critical_sets(rows([0, 3, 1], [0, 2, 1]), 1)[0]
    assert agreement(one, "spearman", 0.0)[0, 1] == 1


def test_entries_without_importance_need_not_be_compared() -> None:
    p = rows([0, 0, 0, 3, 1], [0, 0, 2, 0, 1], [0, 0, 0, 0, 0])
    top, bottom = critical_sets(p, 2)
    assert bottom.entry.tolist() == [0, 1, 0, 1, 0, 1]  # zeros, by index
    top, bottom = critical_sets(p, 2, nonzero=True)
    assert (
        top.entry.tolist() == [3, 4, 2, 4]
        and bottom.entry.tolist() == [4, 3, 4, 2]
        and bottom.start.tolist() == [0, 2, 4, 4]
    )
    assert agreement(bottom, "spearman", 0.5).tolist() == [
        [2, 1 / 3 + 0.5, 0.5],
        [1 / 3 + 0.5, 2, 0.5],
        [0.5, 0.5, 2],
    ]


def test_a_model_that_did_not_change_has_no_importances() -> None:
    still = reduced(FedCPA(k=0.5), X, {"model": X[2]}, X[2])
    assert torch.equal(still.weights, reduced(FedCPA(k=0.5, global_=False), X, {}, X[2]).weights)
    first = reduced(FedCPA(k=0.5, local=False), X)  # nothing to compare with yet
    assert first.fallback and first.weights.tolist() == [1 / 3] * 3


def test_another_part_of_the_model_is_a_first_round() -> None:
    got = reduced(FedCPA(k=0.5), X, {"model": torch.ones(9, dtype=FLOAT)})
    assert torch.equal(got.weights, reduced(FedCPA(k=0.5), X).weights) and len(got.state["model"]) == 4


def test_the_first_round_of_the_authors_code() -> None:
    """Round 0: importances |(theta_i - m) theta_i| and |(m - phi) m| with m the mean model; in round 1 the
    model changed since m."""
    x, received, _ = random_round(1, 5, 40)
    mean = received + x.mean(dim=0)
    got = reduced(FedCPA(k=0.2, literal=True), x, {}, received)
    local = ((received + x - mean) * (received + x)).abs().tolist()
    expected = torch.tensor(
        slow.weights(slow.normality(local, ((mean - received) * mean).abs().tolist(), 8)), dtype=FLOAT
    )
    torch.testing.assert_close(got.weights, expected / (expected > 0).sum(), rtol=0, atol=1e-9)
    torch.testing.assert_close(got.value, got.weights @ x)  # the update itself is against the model sent
    torch.testing.assert_close(got.state["model"], mean)
    rule = FedCPA(k=0.2, literal=True, global_=False)  # still only the first round
    later = reduced(rule, x, reduced(rule, x, {}, received).state, received)
    assert torch.equal(later.weights, reduced(FedCPA(k=0.2, global_=False), x, {}, received).weights)


# ---- settings


def test_the_authors_variant_is_a_preset() -> None:
    rule = build("aggregator", {"name": "fedcpa", "variant": "authors"})
    assert (rule.correlation, rule.literal, rule.k, rule.min_dims) == ("pearson", True, 0.01, 2)
    assert build("aggregator", {"name": "fedcpa", "variant": "authors", "literal": False}).literal is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"topk": False, "bottomk": False}, "nothing would be compared"),
        ({"global_": False, "local": False}, "nothing to compare with"),
    ],
)
def test_senseless_switches_are_refused(settings: dict[str, bool], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("aggregator", {"name": "fedcpa", **settings})


def test_gas_needs_the_memory_off() -> None:
    gas = build("wrapper", {"name": "gas", "p": 2})
    with pytest.raises(ConfigError, match="'fedcpa' keeps a memory"):
        gas(FedCPA(f=1))
    assert gas(FedCPA(f=1, global_=False)).name == "gas(fedcpa)"


# ---- in runs


def test_noise_gets_no_weight(simulate: Callable[..., Run]) -> None:
    run = simulate(
        aggregator="fedcpa",
        model={"name": "mlp", "hidden": 32},
        data={"clients": 8},
        attack={"name": "gaussian", "fraction": 0.25},
        train={"rounds": 3},
    )
    bad = run.malicious()
    assert len(bad) == 2
    for round in (1, 2, 3):
        weights = run.store.arrays(round)["verdict/weights"]
        assert (weights[bad] == 0).all() and (weights > 0).any()
    assert torch.isfinite(run.state()["aggregator/model"]).all()


@pytest.mark.parametrize("wrap", ["", "clip", "bucketing"])
def test_statistics_are_divided_by_as_many_as_parameters_are(wrap: str) -> None:
    """The released code averages whole state dicts: a running mean moves by the sum of lambda times the
    difference, over how many count."""
    layout = Layout.of(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), head="2")
    wire = Wire.of(layout, torch.ones(layout.size, dtype=torch.bool))
    p, n = wire.parameters, 5
    model, x, sent = (
        Key(3).fold(name).normal(*size, dtype=FLOAT)
        for name, size in (("m", (p + 7,)), ("x", (n, p)), ("b", (n, 7)))
    )
    rule: Aggregator = FedCPA(k=0.3, global_=False)
    rule = (
        build("wrapper", {"name": wrap, **({"s": 1} if wrap == "bucketing" else {})})(rule) if wrap else rule
    )
    ids = torch.arange(n)
    ctx = Context(1, ids, ids, Key(0), wire, layout, model, rule)
    merged = ctx.reduce(
        {}, Uplink(ids, {"update": x, "buffers": sent, "count": torch.ones(n, dtype=FLOAT)}), model
    )
    weights = merged.verdict.weights
    assert (
        weights is not None and 0.2 < float(weights.sum()) < 0.99
    )  # some are trusted in part, so the divisors differ
    expected = model[p:].clone()
    for weight, statistics in zip(weights, sent, strict=True):
        expected += weight * (statistics - model[p:])
    torch.testing.assert_close(merged.model[p:], expected, rtol=0, atol=1e-12)


def test_where_only_a_part_of_the_model_travels() -> None:
    x = Key(0).normal(4, 10, dtype=FLOAT)
    ctx = AggregationContext(torch.arange(4), torch.ones(10, dtype=FLOAT), _part_of_a_model(), Key(0), 1, 0)
    got = FedCPA(k=0.2)(x, torch.full((4,), 0.25, dtype=FLOAT), {}, ctx)
    alone = reduced(FedCPA(k=0.2), x[:, :4], received=torch.ones(4, dtype=FLOAT))
    torch.testing.assert_close(got.weights, alone.weights)


def _part_of_a_model() -> Layout:
    whole = Layout.of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
    shared = torch.ones(whole.size, dtype=torch.bool)
    shared[0:2] = False
    shared[whole.under("2")] = False
    shared[whole.under("1.bias")] = False
    return Wire.of(whole, shared).layout(whole)
