from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from holdfast.core.together import computed_alone
from holdfast.detectors.base import Judgement
from holdfast.detectors.norm import Norm
from holdfast.results.run import Run
from tests.detectors.infinite_attack import Endless
from tests.helpers import tiny

REFERENCE = torch.tensor([1.0, -2.0])


def judged(detector: Norm, *updates: list[float]) -> Judgement:
    models = REFERENCE + torch.tensor(updates)
    ctx = SimpleNamespace(reference=REFERENCE, refused={})
    steps = computed_alone(detector.judge({}, ctx, models, torch.arange(len(updates)) + 10))
    with pytest.raises(StopIteration) as end:
        next(steps)
    return end.value.value


def test_an_absolute_threshold() -> None:
    said = judged(Norm(threshold=5.0), [3.0, 4.0], [3.1, 4.1], [0.0, 0.0], [-30.0, 40.0])
    assert said.banned == {11: "update of norm 5.14 is above 5", 13: "update of norm 50 is above 5"}
    torch.testing.assert_close(
        said.scores["norm"], torch.tensor([5.0, 5.14, 0.0, 50.0], dtype=torch.float64), rtol=0, atol=1e-3
    )
    assert Norm().threshold == 10.0 and Norm().unit == "absolute"


def test_a_threshold_in_median_norms() -> None:
    detector = Norm(threshold=2.0, unit="median")
    assert set(judged(detector, [1.0, 0.0], [2.0, 0.0], [4.5, 0.0]).banned) == {12}
    assert (
        set(judged(detector, [1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.9, 0.0]).banned) == set()
    )  # the median is 2.5
    assert set(judged(detector, [1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [5.1, 0.0]).banned) == {13}


@pytest.mark.parametrize("unit", ["absolute", "median"])
def test_not_finite_is_banned_and_moves_no_median(unit: str) -> None:
    inf, nan = float("inf"), float("nan")
    said = judged(
        Norm(threshold=5.0, unit=unit),
        [1.0, 0.0],
        [nan, 0.0],
        [1.0, 0.0],
        [inf, 0.0],
        [-inf, inf],
        [1.0, 0.0],
        [9.0, 0.0],
    )
    assert (
        set(said.banned) == {11, 13, 14, 16} and said.banned[11] == said.banned[13] == "update is not finite"
    )
    assert said.scores["norm"].isinf().tolist() == [False, True, False, True, True, False, False]
    assert (
        not judged(Norm(threshold=5.0), [1e30, 0.0]).scores["norm"].isinf().any()
    )  # float32 could not square it


def test_a_small_cohort_has_no_median_worth_the_name() -> None:
    detector = Norm(threshold=1.0, unit="median")
    assert judged(detector, [7.0, 0.0]).banned == {} and judged(detector, [7.0, 0.0], [0.1, 0.0]).banned == {}
    assert set(judged(detector, [7.0, 0.0], [float("nan"), 0.0]).banned) == {11}
    assert (
        judged(detector, [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]).banned == {}
    )  # two stood still; who learnt is not to blame


def test_a_threshold_below_the_median_is_a_mistake() -> None:
    with pytest.raises(
        ConfigError, match="detector: threshold below 1 median norm would ban half of any cohort"
    ):
        build("detector", {"name": "norm", "threshold": 0.5, "unit": "median"})


def test_in_a_run_the_norm_is_that_of_the_update(simulate: Callable[..., Run]) -> None:
    free = simulate(detectors=({"name": "norm", "threshold": 1e3},))
    norms = free.store.arrays(1)["verdict/scores/norm/norm"]
    middle = float(norms.sort().values[2])
    strict = simulate(detectors=({"name": "norm", "threshold": middle},))
    first = strict.store.arrays(1)
    assert torch.equal(first["verdict/scores/norm/norm"], norms) and (norms > 0).all()
    assert torch.equal(first["verdict/weights"] == 0, norms > middle)
    assert set(strict.store.arrays(2)["cohort"].tolist()).isdisjoint(
        (norms > middle).nonzero().flatten().tolist()
    )  # banned for good


def test_two_of_a_kind_keep_their_scores_apart(simulate: Callable[..., Run]) -> None:
    attack = {"name": "sign-flip", "scale": 50.0, "clients": (2,)}
    run = simulate(
        attack=attack,
        detectors=({"name": "norm", "threshold": 5}, {"name": "norm", "threshold": 3, "unit": "median"}),
    )
    first, second = (run.store.arrays(1)[f"verdict/scores/{name}/norm"] for name in ("norm", "norm-2"))
    assert first[2] > 5 and second[2].isnan() and torch.equal(first[[0, 1, 3, 4]], second[[0, 1, 3, 4]])
    assert run.final["detection/auc/norm/norm"] == 1.0 and run.final["detection/auc/norm-2/norm"] is None


def test_one_detector_is_a_list_too() -> None:
    for given in ("norm", {"name": "norm"}):
        with pytest.raises(
            ConfigError,
            match=r"^detectors: needs a list: detectors = \[\"norm\"\], or \[\[detectors\]\] above",
        ):
            tiny(detectors=given)


@pytest.mark.parametrize("redraw", [False, True])
def test_in_a_run_an_update_that_is_not_finite_is_banned_though_screening_comes_first(
    simulate: Callable[..., Run], redraw: bool
) -> None:
    attack = Endless(fraction=0.2, redraw=True) if redraw else Endless(clients=(2,))
    run = simulate(attack=attack, detectors=("norm",), train={"rounds": 2})
    part, arrays = run.store.read_json("parts/000001.json"), run.store.arrays(1)
    (bad,) = run.malicious(1)
    assert part is not None and part["banned"] == part["refused"] == {str(bad): "update is not finite"}
    assert arrays["verdict/ids"].tolist() == [0, 1, 2, 3, 4] and arrays["verdict/weights"][bad] == 0
    assert arrays["verdict/scores/norm/norm"].isnan().nonzero().flatten().tolist() == [bad]
    assert bad not in run.store.arrays(2)["cohort"].tolist()
    assert (run.final["detection/dacc"], run.final["detection/fpr"], run.final["detection/fnr"]) == (
        1.0,
        0.0,
        0.0,
    )
