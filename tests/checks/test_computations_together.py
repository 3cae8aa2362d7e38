"""What server halves and detectors ask for beside an aggregation: together, and on a device, as alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.aggregators import geometry
from holdfast.aggregators.mixture import Mixture
from holdfast.aggregators.reduction import Reduction
from holdfast.aggregators.similarity import Cosines, Distances, Lengths
from holdfast.attacks.replies import NewRows, Written
from holdfast.core.keys import Key
from holdfast.core.together import Computation, answered
from holdfast.detectors.computations import Sound
from tests.pretended_gpu import pretended_gpu

OWN_TESTS = {Reduction, NewRows, Written}
"""Tested for every rule and every attack (test_aggregators_together.py, test_attacks_together.py)."""
Move = Callable[[Tensor], Tensor]


def rows(place: int, n: int, d: int = 40, what: str = "x") -> Tensor:
    """Models of one of four experiments: the second has rows that are not finite or overflow when they are
    squared, the third a row of zeros and equal rows, the fourth a large part in common."""
    x = Key(place).fold(what).normal(n, d, dtype=torch.float64)
    if place == 1 and n > 2:
        x[0] = 1e200
        x[1, 3] = torch.inf if what == "broken" else 1e160
        x[2, 5] = torch.nan if what == "broken" else 1.0
    if place == 2:
        x[0] = 0.0
        x[n // 2 :] = x[-1].clone()
    return x * 1e-3 + 7 if place == 3 else x


def weights(place: int, *shape: int) -> Tensor:
    return Key(place).fold("weights").uniform(*shape, dtype=torch.float64)


CASES: dict[str, Callable[[int, int, Move], Computation]] = {
    "Cosines": lambda place, n, to: Cosines(to(rows(place, n)), to(rows(place, 5, what="y"))),
    "Distances": lambda place, n, to: Distances(to(rows(place, n))),
    "Lengths": lambda place, n, to: Lengths(to(rows(place, n))),
    "Lengths from a centre": lambda place, n, to: Lengths(to(rows(place, n)), to(rows(place, n).mean(0))),
    "Mixture": lambda place, n, to: Mixture(to(weights(place, 3, n)), to(rows(place, n))),
    "Mixture with weights of the host": lambda place, n, to: Mixture(
        weights(place, 3, n), to(rows(place, n))
    ),
    "Mixture of another type": lambda place, n, to: Mixture(weights(place, 3, n), to(rows(place, n).float())),
    "Mixture of one": lambda place, n, to: Mixture(weights(place, n), to(rows(place, n))),
    "Sound": lambda place, n, to: Sound(to(rows(place, n, what="broken"))),
}
every_case = pytest.mark.parametrize("name", CASES)


def host(x: Tensor) -> Tensor:
    return x


def same(found: list[Any], expected: list[Any]) -> None:
    for here, there in zip(found, expected, strict=True):
        tolerance = 1e-6 if there.dtype == torch.float32 else 1e-12
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(here.cpu(), there, equal_nan=True, **close)  # type: ignore[arg-type]


def test_every_computation_is_tested() -> None:
    known = {kind for kind in Computation.__subclasses__() if kind.__module__.startswith("holdfast.")}
    assert known == {type(make(0, 3, host)) for make in CASES.values()} | OWN_TESTS


@every_case
@pytest.mark.parametrize("n", [1, 2, 6])
def test_several_are_the_same_together_as_alone(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they lie in one memory, and where there are several blocks of columns."""
    monkeypatch.setattr(geometry, "BLOCK", 30)
    make = CASES[name]
    asked = [make(place, n, host) for place in range(4)]
    before = [rows(place, n) for place in range(4)]
    expected = [one.alone() for one in asked]
    assert len({one.alike() for one in asked}) == 1 and asked[0].alike() is not None
    together = asked[0].together(asked[1:])
    assert together is not None
    same(together, expected)
    if name in ("Distances", "Lengths"):
        whole = torch.stack(before)
        kind: Any = type(asked[0])
        beside: list[Any] = [kind(x) for x in whole]
        same(beside[0].together(beside[1:]), expected)
        assert torch.equal(whole, torch.stack(before)), "what is read is not written to"


@every_case
def test_on_a_device_as_on_the_host(name: str) -> None:
    """Alone and together; only Mixture leaves on the device what it finds, and no row crosses."""
    make = CASES[name]
    for n in (1, 6):
        expected = [make(place, n, host).alone() for place in range(4)]
        with pretended_gpu() as gpu:
            asked = [make(place, n, lambda x: x.to(gpu.device)) for place in range(4)]
            one_by_one, together = answered(asked, batch=False), answered(asked)
            assert gpu.largest_read <= 8 * 4 * 6 * 6
            for found in (one_by_one, together):
                stays = {each.device.type for each in found} == {gpu.device.type}
                assert stays is (type(asked[0]) is Mixture)
                with gpu.not_counted():
                    same(found, expected)


def test_experiments_of_different_sizes_are_computed_apart() -> None:
    for make in CASES.values():
        assert make(0, 4, host).alike() != make(1, 5, host).alike()
    assert Lengths(rows(0, 4)).alike() != Lengths(rows(0, 4), rows(0, 4)[0]).alike()
