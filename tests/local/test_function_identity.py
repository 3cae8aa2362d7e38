"""Which functions a program may be shared by."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.core.registry import build
from holdfast.local.function_identity import HoldsTensors, same


def make(value: Any) -> Any:
    return lambda x: x * value


class Rule:
    def __init__(self, weight: Any = 1.0) -> None:
        self.weight = weight

    def loss(self, x: Any) -> Any:
        return x


@dataclass
class World:
    state: Any = field(default_factory=lambda: torch.zeros(2))


def test_closures_over_equal_numbers_are_the_same() -> None:
    assert same(make(2.0)) == same(make(2.0)) and hash(same(make(2.0))) == hash(same(make(2.0)))
    assert same(make(2.0)) != same(make(3.0)) and same(make(1)) != same(make(True))
    assert same(make(make(2))) == same(make(make(2))) != same(make(make(3)))
    assert same(partial(math.pow, 2.0)) == same(partial(math.pow, 2.0)) != same(partial(math.pow, 3.0))


def test_parts_with_equal_settings_are_the_same() -> None:
    assert same(build("loss", "cross-entropy")) == same(build("loss", {"name": "cross-entropy"}))
    smooth = build("loss", {"name": "cross-entropy", "label_smoothing": 0.1})
    assert same(smooth) != same(build("loss", "cross-entropy"))


def test_an_object_is_what_it_holds_now() -> None:
    rule = Rule()
    before = same(rule.loss)
    assert before == same(rule.loss) == same(Rule().loss) and same(make(rule)) == same(make(Rule()))
    rule.weight = 2.0
    assert same(rule.loss) != before
    assert same(math.sqrt) == same(math.sqrt) != same(math.cos)


def test_defaults_and_modules_count() -> None:
    def with_default(value: float) -> Any:
        def loss(x: Any, *, mu: float = value) -> Any:
            return x * mu

        return loss

    assert same(with_default(1.0)) == same(with_default(1.0)) != same(with_default(2.0))
    text, one, two = "def loss(x):\n    return x * mu\n", {"mu": 1.0}, {"mu": 2.0}
    exec(text, one)
    exec(text, two)
    assert same(one["loss"]) != same(two["loss"])


def test_a_function_that_holds_itself() -> None:
    def loss(x: Any) -> Any:
        return x if x < 1 else loss(x - 1)

    with pytest.raises(HoldsTensors, match="itself"):
        same(loss)


@pytest.mark.parametrize(
    "held",
    [
        torch.zeros(1),
        {"a": 1},
        [1],
        World(),
        SimpleNamespace(x=torch.zeros(1)),
        Rule(torch.zeros(1)),
        nn.Linear(1, 1),
    ],
)
def test_what_may_hold_tensors_is_refused(held: Any) -> None:
    for function in (make(held), partial(math.pow, held), make(make(held))):
        with pytest.raises(HoldsTensors):
            same(function)
