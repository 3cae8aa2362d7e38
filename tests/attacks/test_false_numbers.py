"""What attackers say of themselves: factors, mirror images, and anything at all."""

from __future__ import annotations

import pytest
import torch

from holdfast.attacks.false_numbers import lie
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.types import UNDEFINED, Field

SCORE = Field("score", (3,), low=UNDEFINED, high=1)
HONEST = torch.tensor([[1.0, 0.25, UNDEFINED], [0.0, 0.5, 1.0]], dtype=torch.float64)
KEYS = Key(3).fold(torch.tensor([4, 9]))


def test_a_factor() -> None:
    assert lie(10.0, torch.tensor([1.0, 2.0]), Field("count", low=0), KEYS).tolist() == [10.0, 20.0]


def test_the_mirror_image_of_an_accuracy_is_an_accuracy() -> None:
    assert lie("invert", HONEST, SCORE, KEYS).tolist() == [[0.0, 0.75, UNDEFINED], [1.0, 0.5, 0.0]]


def test_mirrored_within_any_bounds_or_else_by_its_sign() -> None:
    numbers = torch.tensor([2.0, 5.0])
    assert lie("invert", numbers, Field("count", low=1, high=9), KEYS).tolist() == [8.0, 5.0]
    assert lie("invert", numbers, Field("scalar"), KEYS).tolist() == [-2.0, -5.0]


def test_a_number_with_a_lower_bound_only_stays_above_it() -> None:
    """Such as FedAS's trace: below the bound, screening would refuse the whole reply and nobody would hear
    the lie."""
    trace = Field("score", low=0)
    assert lie("invert", torch.tensor([4.0, 0.5, 0.0]), trace, KEYS).tolist() == [0.25, 2.0, 0.0]
    said = lie("random", torch.full((2, 4000), 5.0), Field("score", (4000,), low=1), KEYS)
    assert float(said.min()) >= 1 and float((said - 1).square().mean()) == pytest.approx(16.0, abs=1.0)


def test_a_factor_invents_no_figure_either() -> None:
    assert lie(-1.0, HONEST, SCORE, KEYS).tolist() == [[-1.0, -0.25, UNDEFINED], [-0.0, -0.5, -1.0]]
    assert lie(0.5, HONEST, SCORE, KEYS).tolist() == [[0.5, 0.125, UNDEFINED], [0.0, 0.25, 0.5]]


def test_any_accuracy_at_all() -> None:
    said = lie("random", HONEST, SCORE, KEYS)
    assert said[0, 2] == UNDEFINED and bool(((said >= 0) & (said <= 1))[HONEST != UNDEFINED].all())
    assert len(said[HONEST != UNDEFINED].unique()) == 5
    assert torch.equal(said[1:], lie("random", HONEST[1:], SCORE, KEYS[torch.tensor([1])])), (
        "whoever else lies changes nothing"
    )
    assert not torch.equal(said, lie("random", HONEST, SCORE, Key(4).fold(torch.tensor([4, 9]))))
    many = lie("random", torch.zeros(2, 4000), Field("score", (4000,), low=2, high=4), KEYS)
    assert (
        2 <= float(many.min())
        and float(many.max()) <= 4
        and float(many.mean()) == pytest.approx(3.0, abs=0.05)
    )
    free = lie("random", torch.full((2, 4000), 5.0), Field("scalar", (4000,)), KEYS)
    assert float(free.std()) == pytest.approx(5.0, abs=0.2)


def test_unknown_words_for_false_numbers_are_refused() -> None:
    assert build("attack", {"name": "sign-flip", "lies": {"score": "invert", "count": 2}}).lies == {
        "score": "invert",
        "count": 2.0,
    }
    with pytest.raises(ConfigError, match=r"attack\.lies"):
        build("attack", {"name": "sign-flip", "lies": {"score": "reverse"}})
