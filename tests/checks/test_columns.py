"""Every registered aggregator, wrapper and detector on updates that several ranks share: the number of ranks
changes no bit, and what comes out is what one process without ranks computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.aggregators import geometry
from holdfast.aggregators.base import Aggregator, Reduced
from holdfast.aggregators.reduction import Reduction
from holdfast.core.columns import READS, Columns
from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from tests.checks.aggregator_cases import EVERY_WAY, RULES, experiments
from tests.helpers import built_in
from tests.thread_ranks import ThreadRanks, on_ranks

COUNTS = (1, 2, 3)
WIDTHS = (40, 65, 300)
"""One piece, so that other ranks have none; a last piece of a single column; a few pieces."""
EACH = [0, 1, 2, 3]
"""Places of `experiments`: plain, a row far off, equal values, a large part in common."""
pytestmark = pytest.mark.filterwarnings("ignore:.*reads whole updates:RuntimeWarning")


def rounds(rule: Aggregator, d: int, dtype: torch.dtype, ranks: ThreadRanks | None) -> list[Reduced]:
    """Two rounds of four federations each, every second round with what the rule remembers of the first."""
    found = []
    columns = None if ranks is None else Columns(d, ranks)
    states: list[Any] = [None] * len(EACH)
    for round in (1, 2):
        several = experiments(9, d, round, dtype)
        for place, x, w, ctx in zip(EACH, *several, strict=True):
            ctx = replace(ctx, assumed=rule.assumed(len(x)))
            if columns is not None:
                assert ctx.root is not None
                x, ctx = columns.mine(x), replace(ctx, root=columns.mine(ctx.root))
            state = rule.init(ctx.layout) if round == 1 else states[place]
            found.append(Reduction(rule, x, w, state, ctx, columns).alone())
            states[place] = found[-1].state
    return found


def bits(found: list[Reduced]) -> list[Tensor]:
    return [
        value
        for one in found
        for value in (
            one.value,
            one.weights,
            torch.tensor([one.fallback, one.partial]),
            *(one.state[k] for k in sorted(one.state)),
        )
    ]


def assert_same_bits(found: list[Tensor], expected: list[Tensor], about: str) -> None:
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == other.dtype and one.shape == other.shape, f"{about}: {place}"
        same = torch.equal(one, other) or bool(((one == other) | (one != one) & (other != other)).all())
        assert same, f"{about}: {place}: {(one.double() - other.double()).abs().max()}"


def assert_ranks_change_nothing(
    work: Callable[[int, torch.dtype, ThreadRanks | None], list[Tensor]], widths: tuple[int, ...] = WIDTHS
) -> None:
    """`work` gives all numbers of a case, for a width and a type, on one of several ranks or without any."""
    cases = [(d, dtype) for d in widths for dtype in (torch.float32, torch.float64)]
    first = on_ranks(1, lambda ranks: [work(*case, ranks) for case in cases])[0]
    for count in COUNTS[1:]:
        for rank, found in enumerate(
            on_ranks(count, lambda ranks: [work(*case, ranks) for case in cases])
        ):
            for case, one, other in zip(cases, found, first, strict=True):
                assert_same_bits(one, other, f"{case}, rank {rank} of {count}")
    for (d, dtype), found in zip(cases, first, strict=True):
        if dtype == torch.float64:
            for place, (one, other) in enumerate(zip(found, work(d, dtype, None), strict=True)):
                torch.testing.assert_close(
                    one, other, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda m: f"{d}, {place}: {m}"
                )


@pytest.mark.parametrize("settings", EVERY_WAY)
def test_every_rule(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "BLOCK", 1000)  # blocks of columns that end anywhere
    rule: Aggregator = build("aggregator", {"f": 2, **settings})
    assert rule.reads in READS
    assert_ranks_change_nothing(lambda *case: bits(rounds(rule, *case)))


INSIDE = ["mean", "median", "krum", "rfa", "centered-clip", "fltrust"]


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("wrapper", built_in("wrapper"))
def test_every_wrapper(wrapper: str, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "BLOCK", 1000)
    try:
        more = {"p": 4} if wrapper == "gas" else {}
        rule = build("wrapper", {"name": wrapper, **more})(build("aggregator", {"name": inside, "f": 2}))
    except ConfigError:
        return  # a wrapper that this rule cannot have
    assert READS.index(rule.reads) >= READS.index(rule.layers()[0].reads)
    assert_ranks_change_nothing(lambda *case: bits(rounds(rule, *case)), (65, 300))
