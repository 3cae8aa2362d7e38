from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from holdfast.local.schedules import function_schedule


def over_rounds(given: Any, rounds: int) -> list[float]:
    schedule = build("schedule", given)
    assert schedule.over == "rounds"
    return [schedule.of_round(round, rounds) for round in range(1, rounds + 1)]


@pytest.mark.parametrize(
    ("given", "factors"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        ({"name": "constant", "warmup": 3}, [1 / 4, 2 / 4, 3 / 4, 1, 1]),
        ({"name": "warm-up", "warmup": 1}, [1 / 2, 1, 1, 1, 1]),
        ({"name": "step", "gamma": 0.5, "every": 2}, [1, 1, 0.5, 0.5, 0.25]),
        ({"name": "step", "gamma": 0.5, "every": 1, "warmup": 2}, [1 / 3, 2 / 3, 1, 0.5, 0.25]),
        ({"name": "exponential", "gamma": 0.9}, [1, 0.9, 0.81, 0.729, 0.6561]),
        ({"name": "cosine", "length": 2}, [1, 0.5, 0, 0, 0]),
        (
            {"name": "cosine", "warmup": 1, "floor": 0.2},
            [0.5, 1, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5))],
        ),
    ],
    ids=str,
)
def test_factors_by_hand(given: Any, factors: list[float]) -> None:
    assert over_rounds(given, 5) == pytest.approx(factors, abs=1e-12)


def test_over_steps_every_client_goes_through_all_of_it() -> None:
    schedule = build("schedule", {"name": "cosine", "over": "steps"})
    assert schedule.of_round(7, 9) == 1.0
    assert schedule.of_steps(7, 2) == pytest.approx([1, 0.5])
    root = math.sqrt(0.5)
    assert schedule.of_steps(7, 4) == pytest.approx([1, (1 + root) / 2, 0.5, (1 - root) / 2])
    assert schedule.of_steps(7, 0) == []


def test_what_comes_after_the_last_round_has_its_factor() -> None:
    schedule = build("schedule", "cosine")
    assert schedule.of_round(5, 4) == schedule.of_round(4, 4) > 0


def test_functions_of_the_round_and_of_the_step() -> None:
    by_round = function_schedule(lambda round: 1 / round)
    assert [by_round.of_round(r, 3) for r in (1, 2, 3, 4)] == [1, 1 / 2, 1 / 3, 1 / 3]
    by_step = function_schedule(lambda round, step: round + step / 10)
    assert by_step.over == "steps" and by_step.of_steps(2, 3) == [2.1, 2.2, 2.3]
    for wrong in (lambda round: -1.0, lambda round: float("nan"), lambda round: "fast"):
        with pytest.raises(ConfigError, match="the function returned .* for 1"):
            function_schedule(wrong).of_round(1, 1)
    with pytest.raises(ConfigError, match="this one takes 3 arguments"):
        function_schedule(lambda a, b, c: 1.0)
