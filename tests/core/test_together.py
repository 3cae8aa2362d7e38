"""Computations that are answered together."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from holdfast.core.together import Computation, alone, answered, computed_alone, in_lockstep, stacked


@dataclass(frozen=True, eq=False)
class Square(Computation):
    """Squares a number; together only with others of the same sign, and never with 13."""

    number: int
    made: list[str]

    def alike(self) -> Hashable | None:
        return self.number > 0

    def alone(self) -> int:
        if self.number == 13:
            raise ValueError("13 is not squared")
        self.made.append(f"{self.number} alone")
        return self.number**2

    def together(self, others: Sequence[Any]) -> list[int] | None:
        numbers = [self.number, *(other.number for other in others)]
        if 13 in numbers:
            raise ValueError("13 is not squared")
        self.made.append(f"{numbers} together")
        return [number**2 for number in numbers]


def test_computations_that_are_alike_are_made_together_and_keep_their_places() -> None:
    made: list[str] = []
    asked = [Square(number, made) for number in (2, -3, 4, -5, 6)]
    assert answered(asked, batch=True) == [4, 9, 16, 25, 36]
    assert made == ["[2, 4, 6] together", "[-3, -5] together"]
    assert all(one.seconds > 0 for one in asked)
    assert answered(asked[:2]) == [4, 9] and made[2:] == ["2 alone", "-3 alone"]  # numbers of the host


def test_one_that_fails_does_not_stop_the_others() -> None:
    made: list[str] = []
    first, second, third = answered([Square(number, made) for number in (2, 13, 3)], batch=True)
    assert (first, third) == (4, 9) and isinstance(second, ValueError)
    assert made == ["2 alone", "3 alone"]


class OnlyAlone(Square):
    def together(self, others: Sequence[Any]) -> list[int] | None:
        raise RuntimeError("not together")


def test_a_fault_of_the_form_for_several_is_told() -> None:
    with pytest.warns(RuntimeWarning, match="2 experiments .* OnlyAlone together failed: RuntimeError: not"):
        assert answered([OnlyAlone(number, []) for number in (2, 3)], batch=True) == [4, 9]


def steps(numbers: Sequence[int], made: list[str]) -> Generator[Computation, Any, int]:
    total = 0
    for number in numbers:
        total += yield Square(number, made)
    return total


def test_generators_of_different_lengths_go_in_lockstep() -> None:
    made: list[str] = []
    several = [steps(numbers, made) for numbers in ([1, 2], [3], [], [4, 5, 6])]
    assert in_lockstep(several, batch=True) == [5, 9, 0, 77]
    assert made == ["[1, 3, 4] together", "[2, 5] together", "6 alone"]
    with pytest.raises(ValueError, match="13"):
        in_lockstep([steps([1], made), steps([13], made)], batch=True)
    assert alone(steps([1, 2], made)) == 5


def test_other_requests_are_passed_on() -> None:
    def mixed() -> Generator[Any, Any, int]:
        return (yield Square(3, [])) + (yield "how many?")

    asking = computed_alone(mixed())
    assert next(asking) == "how many?"
    with pytest.raises(StopIteration) as end:
        asking.send(5)
    assert end.value.value == 14


def test_neighbours_in_memory_are_not_copied() -> None:
    whole = torch.arange(24.0).view(6, 4)
    parts = list(whole.split(2))
    got = stacked(parts)
    assert got.tolist() == whole.view(3, 2, 4).tolist() and got.data_ptr() == whole.data_ptr()
    for others in ([parts[0], parts[2]], [parts[1], parts[0]], [parts[0], parts[1].clone()]):
        copy = stacked(others)
        assert torch.equal(copy, torch.stack(others)) and copy.data_ptr() != whole.data_ptr()
