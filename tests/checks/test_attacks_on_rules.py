"""Attacks that know the defence, against every registered rule and wrapper: each can be tried, alone and on
updates that several ranks share."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from holdfast.aggregators.base import Aggregator
from holdfast.attacks import Adversary
from holdfast.attacks.target import Target
from holdfast.core.columns import Columns
from holdfast.core.flat import Layout
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.types import Field, Uplink, broadcast
from tests.helpers import built_in
from tests.thread_ranks import ThreadRanks, on_ranks

N, D = 9, 130
LAYOUT = Layout.of(nn.Linear(D, 1, bias=False))
HONEST = Key(7).normal(N, D, dtype=torch.float64) * 0.1 + 0.3


def rule_of(name: str) -> Aggregator:
    """A rule by its name, or a wrapper around the median."""
    if name in built_in("aggregator"):
        return build("aggregator", {"name": name, "f": 1})
    return build("wrapper", name)(build("aggregator", {"name": "median", "f": 1}))


def sent(attack: str, name: str, ranks: ThreadRanks | None = None, x: Tensor = HONEST) -> Tensor:
    """What all clients send in the end."""
    made = Adversary(
        build("attack", {"name": attack, "clients": (1, 4), "evaluations": 2}), torch.arange(N), Key(0)
    )
    made.target = Target(rule_of(name), lambda: LAYOUT)
    up = Uplink(torch.arange(N), {"update": x, "count": torch.arange(N) + 1.0})
    if ranks is not None:
        columns = Columns(D, ranks)
        up = replace(up.having(update=columns.mine(x).clone()), columns=columns)
    asked = broadcast("train", Key(3).normal(D + 1, dtype=torch.float64), up.ids)
    schema = {"update": Field("update", (D,)), "count": Field("count")}
    return made.poison("train", schema, up, Key(1), 1, asked).whole()["update"]


@pytest.mark.parametrize("name", [*built_in("aggregator"), *built_in("wrapper")])
def test_every_rule_can_be_tried(name: str) -> None:
    before = HONEST.clone()
    alone = sent("optimal-ipm", name)
    assert torch.equal(HONEST, before) and bool(torch.isfinite(alone).all())
    assert torch.equal(sent("optimal-ipm", name), alone)
    assert bool(torch.isfinite(sent("agr-tailored", name)).all())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a rule that reads whole rows says so
        for shared in on_ranks(2, lambda ranks: sent("optimal-ipm", name, ranks)):
            torch.testing.assert_close(shared, alone, rtol=1e-6, atol=1e-9)
    far = HONEST.clone()
    far[0] = 1e30  # a benign client whose training ran away, but is finite
    assert bool(torch.isfinite(sent("optimal-ipm", name, x=far)[[1, 4]]).all())
