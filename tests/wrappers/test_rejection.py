"""LFR and ERR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Assessment, Reduced
from holdfast.aggregators.reduction import Candidates, Reduction
from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from holdfast.core.types import ROOT, Exchange
from holdfast.engine.simulator import Simulator
from holdfast.methods.context import Context
from holdfast.results.run import Run
from holdfast.sweeps.session import resume
from tests.checks.aggregator_cases import context_of
from tests.helpers import assert_same, everything, run_all, tiny

X = torch.tensor([[1.0], [1.0], [1.0], [-5.0]], dtype=torch.float64)
EVEN = torch.full((4,), 0.25, dtype=torch.float64)
ATTACKED: dict[str, Any] = {
    "data": {"clients": 5, "root": 40},
    "attack": {"name": "sign-flip", "scale": 5.0, "clients": (2,)},
    "train": {"rounds": 3},
}


def rule(name: str = "lfr", inner: str = "mean", f: float = 1, **settings: Any) -> Aggregator:
    return build("wrapper", {"name": name, **settings})(build("aggregator", {"name": inner, "f": f}))


def context(
    loss: Callable[[float], float], error: Callable[[float], float] | None = None, ids: Tensor | None = None
) -> AggregationContext:
    def assess(candidates: Callable[[], Sequence[Reduced]]) -> Assessment:
        values = [float(one.value) for one in candidates()]
        return Assessment(*(torch.tensor([measure(v) for v in values]) for measure in (loss, error or loss)))

    return replace(context_of(X, ids, 1), assess=assess)


def test_by_hand() -> None:
    """All: -0.5, which is 1.5 from 1. Without an honest client -1, which is 2; without the attacker 1."""
    for name in ("lfr", "err"):
        got = rule(name)(X, EVEN, {}, context(lambda value: abs(value - 1)))
        assert got.value.tolist() == [1.0] and not got.fallback
        torch.testing.assert_close(got.weights, torch.tensor([1, 1, 1, 0], dtype=torch.float64) / 3)


def test_of_equal_impacts_the_lowest_ids_stay() -> None:
    got = rule()(X, EVEN, {}, context(lambda value: 1.0, ids=torch.tensor([3, 9, 4, 5])))
    assert got.weights.tolist() == [1 / 3, 0.0, 1 / 3, 1 / 3]


def test_union_leaves_out_by_both() -> None:
    x = torch.tensor([[1.0], [2.0], [4.0], [8.0]], dtype=torch.float64)
    ctx = context(lambda value: value, lambda value: -value)  # the loss grows with the value, the error falls
    assert rule()(x, EVEN, {}, ctx).weights.nonzero().flatten().tolist() == [0, 1, 2]
    assert rule("err")(x, EVEN, {}, ctx).weights.nonzero().flatten().tolist() == [1, 2, 3]
    assert rule(union=True)(x, EVEN, {}, ctx).weights.nonzero().flatten().tolist() == [1, 2]


def test_without_an_answer_or_a_client_that_is_left_the_median_answers() -> None:
    nothing = Assessment(torch.zeros(0), torch.zeros(0))
    for ctx in (replace(context_of(X, None, 1), assess=answer) for answer in (None, lambda _: nothing)):
        got = rule()(X, EVEN, {}, ctx)
        assert got.fallback and got.value.tolist() == [1.0]
    assert rule(f=4)(X, EVEN, {}, replace(context(abs), assumed=4)).fallback


def test_the_rule_is_asked_once_and_started_again_with_the_answer() -> None:
    asked = Reduction(rule(inner="median"), X, EVEN, {}, context_of(X, None, 1)).alone()
    assert isinstance(asked, Candidates)
    assert [float(one.value) for one in asked.reduced] == [1.0, 1.0, 1.0, 1.0, 1.0]
    answer = Assessment(torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), torch.zeros(5))
    found = Reduction(rule(), X, EVEN, {}, context_of(X, None, 1), assessment=answer).alone()
    assert isinstance(found, Reduced) and found.value.tolist() == [1.0]


def test_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="'lfr.mean.' needs the server's own data; set data.root"):
        tiny(aggregator={"name": "mean", "f": 1, "wrap": ["lfr"]}).parts()
    with pytest.raises(ConfigError, match="wrapper 'err' needs f, the share"):
        build("wrapper", "err")(build("aggregator", "mean"))
    ctx = object.__new__(Context)
    object.__setattr__(ctx, "aggregator", rule())
    with pytest.raises(ConfigError, match="'lfr.mean.' asks the server to test models, which ctx.reduce"):
        ctx.reduce({}, None, None)  # type: ignore[arg-type]


def test_in_runs_the_attacker_has_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a part of a model does not travel, and where it has buffers. Only the server tests."""
    asked: list[list[int]] = []
    exchange = Simulator.exchange

    def seen(self: Simulator, calls: Any) -> Any:
        asked.extend(c.exchange.to.tolist() for c in calls if c.exchange.task == "assess")
        return exchange(self, calls)

    plays = [
        ("fedavg", ["lfr"]),
        ("fedavg", ["err"]),
        ("fedavg", ["lfr", {"name": "bucketing", "s": 1}]),
        ("fedper", ["lfr"]),
        ("fedbn", ["clip", "lfr"]),
    ]
    tables = [
        {**ATTACKED, "method": method, "aggregator": {"name": "mean", "f": 1, "wrap": wrap}}
        for method, wrap in plays
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Simulator, "exchange", seen)
        together = run_all(tables, tmp_path / "together")
    assert asked == [[ROOT]] * 3 * len(plays)
    for run, (_, wrap) in zip(together, plays, strict=True):
        weights = run.table("weights")
        bad = weights[weights["client"] == 2]["value"]
        if wrap != ["err"]:  # few samples: many impacts are equal
            assert list(bad) == [0.0] * 3 and run.final["fallback_rounds"] == 0
    (alone,) = run_all(tables[:1], tmp_path / "alone")
    assert_same(everything(together[0]), everything(alone))


def test_a_run_that_is_continued_is_the_longer_run(tmp_path: Path) -> None:
    """With what asks the server and what acts on the model."""
    table = {**ATTACKED, "aggregator": {"name": "mean", "f": 1, "wrap": ["lfr", "weak-dp", "crfl"]}}
    whole, short = run_all([table], tmp_path / "whole")[0], {**table, "train": {"rounds": 1}}
    (run,) = run_all([short], tmp_path / "short")
    resume(run.path, rounds=3)
    assert_same(everything(whole), everything(Run(run.path, tiny(**table))), tolerance=0)


def test_a_model_that_answers_nothing_finite_is_as_bad_as_can_be(tmp_path: Path) -> None:
    attack = {"name": "gaussian", "sigma": 1e30, "clients": (2,)}
    aggregator = {"name": "mean", "f": 1, "wrap": ["lfr"]}
    (run,) = run_all([{**ATTACKED, "attack": attack, "aggregator": aggregator}], tmp_path)
    weights = run.table("weights")
    assert not weights[weights["client"] == 2]["value"].any() and run.final["fallback_rounds"] == 0


def test_its_requests_say_what_they_carry() -> None:
    exchange = Exchange("assess", torch.tensor([ROOT]), torch.zeros(3, 2), torch.arange(3)[None])
    assert exchange.bytes_down().tolist() == [24] and not exchange.is_client.any()


@pytest.mark.slow
def test_the_papers_claim_lfr_is_better_than_err_and_the_union_is_as_good(tmp_path: Path) -> None:
    """Fang et al., section 5: LFR restores much of what an attack takes, ERR less, and the union is about as
    good as LFR. So it is under flipped signs; under IPM with a plain mean LFR alone fails."""
    from tests.defence_plays import played

    wraps: list[list[Any]] = [[], ["lfr"], ["err"], [{"name": "lfr", "union": True}]]
    rules = [{"name": "mean", "f": 0.3, "wrap": wrap} for wrap in wraps]
    flip = {"name": "sign-flip", "fraction": 0.3, "scale": 5.0}
    bare, loss, error, both = (one["accuracy"] for one in played(tmp_path / "flip", rules, flip))
    assert bare < 0.3 and loss > 0.9 and error < 0.5 and both > 0.9
    ipm = {"name": "ipm", "knows": "everyone", "fraction": 0.3}
    bare, loss, error, both = (one["accuracy"] for one in played(tmp_path / "ipm", rules, ipm))
    assert bare < 0.3 and loss < 0.5 and both > 0.9
