"""Which functions a program may be shared by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from holdfast.core.registry import build
from holdfast.local.same import HoldsTensors, same


def make(value: Any) -> Any:
    return lambda x: x * value


class Rule:
    def loss(self, x: Any) -> Any:
        return x


@dataclass
class World:
    number: int = 1


def test_closures_over_equal_numbers_are_the_same() -> None:
    assert same(make(2.0)) == same(make(2.0)) and hash(same(make(2.0))) == hash(same(make(2.0)))
    assert same(make(2.0)) != same(make(3.0)) and same(make(1)) != same(make(True))
    assert same(make(make(2))) == same(make(make(2))) != same(make(make(3)))
    assert same(partial(math.pow, 2.0)) == same(partial(math.pow, 2.0)) != same(partial(math.pow, 3.0))


def test_parts_with_equal_settings_are_the_same() -> None:
    assert same(build("loss", "cross-entropy")) == same(build("loss", {"name": "cross-entropy"}))
    smooth = build("loss", {"name": "cross-entropy", "label_smoothing": 0.1})
    assert same(smooth) != same(build("loss", "cross-entropy"))


def test_objects_are_the_same_only_as_themselves() -> None:
    rule = Rule()
    assert same(rule.loss) == same(rule.loss) != same(Rule().loss)
    assert same(make(rule)) == same(make(rule)) != same(make(Rule()))
    assert same(math.sqrt) == same(math.sqrt) != same(math.cos)


@pytest.mark.parametrize("held", [torch.zeros(1), {"a": 1}, [1], World()])
def test_what_may_hold_tensors_is_refused(held: Any) -> None:
    for function in (make(held), partial(math.pow, held), make(make(held))):
        with pytest.raises(HoldsTensors):
            same(function)
