"""Every registered aggregator, wrapper and detector on updates that several ranks share: the number of ranks
changes no bit, and what comes out is what one process without ranks computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.aggregators import geometry
from holdfast.aggregators.base import Aggregator, Reduced
from holdfast.aggregators.reduction import Candidates, Reduction
from holdfast.core.columns import READS, Columns, sharing
from holdfast.core.errors import ConfigError
from holdfast.core.generators import relay
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.together import alone
from holdfast.core.types import UNDEFINED, Exchange, Uplink
from holdfast.detectors.computations import Sound
from tests.checks.aggregator_cases import EVERY_WAY, assessed_by, experiments
from tests.checks.test_wrappers import ASKS, SHOWN_THE_SAME
from tests.helpers import built_in, some_now
from tests.thread_ranks import ThreadRanks, on_ranks

COUNTS = (1, 2, 3)
CASES = [(40, torch.float32), (65, torch.float64), (300, torch.float32), (300, torch.float64)]
"""Columns: one piece, so that other ranks have none; a last piece of a single column; a few pieces."""
EACH = [0, 1, 2, 3]
"""Places of `experiments`: plain, a row far off, equal values, a large part in common."""
pytestmark = pytest.mark.filterwarnings("ignore:.*reads whole updates:RuntimeWarning")


def rounds(
    rule: Aggregator, d: int, dtype: torch.dtype, ranks: ThreadRanks | None, n: int = 9
) -> list[Reduced]:
    """A round of four federations, and another one with what the rule remembers of it."""
    found = []
    columns = None if ranks is None else Columns(d, ranks)
    states: list[Any] = [None] * len(EACH)
    for round in (1, 2) if rule.remembers() else (1,):
        several = experiments(n, d, round, dtype)
        for place, x, w, ctx in zip(EACH, *several, strict=True):
            ctx = replace(ctx, assumed=rule.assumed(len(x)))
            if columns is not None:
                assert ctx.root is not None
                x, ctx = columns.mine(x), replace(ctx, root=columns.mine(ctx.root))
            state = rule.init(ctx.layout) if round == 1 else states[place]
            found.append(reduced(Reduction(rule, x, w, state, ctx, columns), several[2][place].root))
            states[place] = found[-1].state
    return found


def reduced(reduction: Reduction, root: Tensor | None) -> Reduced:
    """The aggregate, where the model of one is as bad as that is far from the root update."""
    found = reduction.alone()
    if not isinstance(found, Candidates):
        return found
    assert root is not None
    assess = assessed_by(root)
    found = replace(reduction, assessment=assess(lambda: found.reduced)).alone()
    assert isinstance(found, Reduced)
    return found


def bits(one: Reduced) -> list[Tensor]:
    state = [one.state[name] for name in sorted(one.state)]
    return [one.value, one.weights, torch.tensor([one.fallback, one.partial]), *state]


def assert_same_bits(found: list[Tensor], expected: list[Tensor], about: str) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape, about
        if torch.equal(one, other):
            continue
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{about}: {m}")


def assert_ranks_change_nothing(
    rule: Aggregator,
    cases: Sequence[tuple[int, torch.dtype]],
    by_rounding: tuple[int, ...] = (),
    n: int = 9,
) -> None:
    """`by_rounding`: federations in which rounding alone decides between clients that are alike."""
    if rule.reads == "rows":
        cases = cases[1:2]  # no rank computes on columns

    def work(ranks: ThreadRanks) -> list[list[Reduced]]:
        return [rounds(rule, *case, ranks, n) for case in cases]

    first = on_ranks(1, work)[0]
    for count in COUNTS[1:]:
        for rank, found in enumerate(on_ranks(count, work)):
            for case, some, others in zip(cases, found, first, strict=True):
                for place, (one, other) in enumerate(zip(some, others, strict=True)):
                    assert_same_bits(bits(one), bits(other), f"{case}, {place}, rank {rank} of {count}")
    for (d, dtype), found in zip(cases, first, strict=True):
        if dtype == torch.float64:
            for place, (one, other) in enumerate(zip(found, rounds(rule, d, dtype, None, n), strict=True)):
                if place % len(EACH) not in by_rounding:
                    # of a row of 1e30 few digits are left
                    tolerance = 1e-8 if place % len(EACH) == 1 else 1e-10
                    for a, b in zip(bits(one), bits(other), strict=True):
                        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("settings", some_now(EVERY_WAY, every=3))
def test_every_rule(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "BLOCK", 1000)  # blocks of columns that end anywhere
    rule: Aggregator = build("aggregator", {"f": 2, **settings})
    assert rule.reads in READS
    assert_ranks_change_nothing(rule, CASES)


INSIDE = ["mean", "median", "krum", "rfa", "centered-clip", "fltrust"]


@pytest.mark.parametrize(
    ("wrapper", "inside"),
    some_now(
        (
            (w, r)
            for w in built_in("wrapper")
            for r in (INSIDE[:2] if w in SHOWN_THE_SAME else INSIDE[:3] if w in ASKS else INSIDE)
        ),
        every=4,
    ),
)
def test_every_wrapper(wrapper: str, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "BLOCK", 1000)
    try:
        more = {"p": 4} if wrapper == "gas" else {}
        rule = build("wrapper", {"name": wrapper, **more})(build("aggregator", {"name": inside, "f": 2}))
    except ConfigError:
        return  # a wrapper that this rule cannot have
    assert READS.index(rule.reads) >= READS.index(rule.layers()[0].reads)
    cases = CASES[1:2] if "assess" in rule.needs else CASES[1:3]  # the rule is asked n + 1 times
    assert_ranks_change_nothing(rule, cases, by_rounding=(2,))


def test_too_few_clients_fall_back_to_the_median_of_all_columns() -> None:
    rule: Aggregator = build("aggregator", {"name": "krum", "f": 4})
    assert all(one.fallback for one in rounds(rule, 65, torch.float64, None))
    assert_ranks_change_nothing(rule, CASES[1:2])


@pytest.mark.parametrize("name", ["krum", "rfa", "clustered", "nnm"])
def test_more_clients_than_columns(name: str) -> None:
    """Tables of all pairs of clients are whole on every rank, whatever columns it has."""
    nnm = name == "nnm"
    rule: Aggregator = build("aggregator", {"name": "mean" if nnm else name, "f": 2})
    rule = build("wrapper", "nnm")(rule) if nnm else rule
    assert_ranks_change_nothing(rule, CASES[1:2], by_rounding=(1, 2), n=80)


def judged(name: str, d: int, dtype: torch.dtype, ranks: ThreadRanks | None) -> list[Any]:
    """What a detector says of models that this rank has some columns of, in two rounds."""
    detector, columns = build("detector", name), None if ranks is None else Columns(d, ranks)
    found: list[Any] = []
    state = detector.init()
    for round in (1, 2):
        x, _, contexts = experiments(9, d, round, dtype)
        models, reference = x[0].clone(), contexts[0].received
        models[3], models[5, d - 1] = models[3] * 40, torch.nan  # one column that only the last rank has
        layout, wire = contexts[0].layout, SimpleNamespace(layout=lambda whole: whole)
        if columns is not None:
            models, reference = columns.mine(models), columns.mine(reference)
            if detector.reads == "rows":
                models, reference = columns.whole(models), columns.whole(reference)
        ctx = SimpleNamespace(
            reference=reference,
            refused={},
            layout=layout,
            wire=wire,
            buffers=models[:, :0],
            counts=None,
            available=contexts[0].ids,
            cohort=contexts[0].ids,
            key=Key(3).fold(round),
        )
        shown = columns if detector.reads != "rows" else None
        steps = relay(detector.judge(state, ctx, models, contexts[0].ids), during=partial(sharing, shown))
        judgement = alone(answered_by_everyone(steps))
        state = judgement.state
        found.append(judgement)
    return found


def answered_by_everyone(steps: Any) -> Any:
    """Members of a committee give every model that they are asked about the same score."""

    def ask(request: Any) -> Any:
        if isinstance(request, Exchange):
            scores = torch.where(request.pick >= 0, 0.5, UNDEFINED).double()
            return Uplink(request.to, {"score": scores})
        return (yield request)

    return relay(steps, ask)


def test_a_model_is_finite_where_all_of_its_columns_are() -> None:
    models = torch.zeros(3, 200)
    models[1, 0], models[2, 199] = torch.nan, torch.inf

    def work(ranks: ThreadRanks) -> list[bool]:
        columns = Columns(200, ranks)
        with sharing(columns):
            return Sound(columns.mine(models)).alone().tolist()

    assert on_ranks(3, work) == [[True, False, False]] * 3


@pytest.mark.parametrize("name", built_in("detector"))
def test_every_detector(name: str) -> None:
    for d, dtype in CASES:
        first = on_ranks(1, lambda ranks, case=(name, d, dtype): judged(*case, ranks))[0]
        for count in COUNTS[1:]:
            for found in on_ranks(count, lambda ranks, case=(name, d, dtype): judged(*case, ranks)):
                for one, other in zip(found, first, strict=True):
                    assert (one.banned, one.rejected) == (other.banned, other.rejected)
                    for part in ("scores", "tables", "state"):
                        here, there = getattr(one, part), getattr(other, part)
                        assert_same_bits(list(here.values()), list(there.values()), f"{part} of {count}")
        plain = judged(name, d, dtype, None)
        assert first[0].banned or first[0].rejected
        for one, other in zip(first, plain, strict=True):
            assert one.banned.keys() == other.banned.keys() and one.rejected.keys() == other.rejected.keys()
            for key, value in one.scores.items():
                tolerance = 1e-10 if dtype == torch.float64 else 1e-4
                torch.testing.assert_close(
                    value, other.scores[key], rtol=tolerance, atol=tolerance, equal_nan=True
                )
