"""The choices of aggregators as detectors, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.types import State
from holdfast.detectors.deepsight import DeepSight
from holdfast.detectors.flame import Flame
from holdfast.detectors.multi_krum import MultiKrum
from holdfast.models.backbone_head import BackboneHead
from holdfast.results.run import Run
from tests.checks.aggregator_cases import apply
from tests.detectors.judging import judged

LINE = [[0.0], [1.0], [3.0], [10.0], [11.0]]


def test_multi_krum_rejects_those_that_the_rule_leaves_out() -> None:
    """Krum's scores on the line are 10, 5, 13, 50 and 65: see tests/aggregators/test_krum.py."""
    said = judged(MultiKrum(f=1), LINE, [7.0])
    assert said.rejected == {4: "Krum's score is 65"} and said.banned == {}
    assert said.scores["crowding"].tolist() == [10, 5, 13, 50, 65]
    assert set(judged(MultiKrum(f=1, keep=2), LINE).rejected) == {2, 3, 4}
    x = Key(3).normal(12, 5, dtype=torch.float64)
    even = torch.full((12,), 1 / 12, dtype=torch.float64)
    for settings in ({}, {"variant": "authors"}, {"iterative": True}):
        kept = apply("multi-krum", x, even, f=3, **settings).weights > 0
        rejected = judged(MultiKrum(f=0.25, **settings), x).rejected
        assert sorted(rejected) == (~kept).nonzero().flatten().tolist()


def test_too_few_clients_for_multi_krum() -> None:
    said = judged(MultiKrum(f=2), LINE)
    assert said.rejected == {} and said.scores["crowding"].isnan().all()
    with pytest.raises(ConfigError, match="detector.f: a number of clients is whole"):
        build("detector", {"name": "multi-krum", "f": 1.5})
    with pytest.raises(ConfigError, match="detector.f: needs n >= 2f \\+ 3, which no cohort meets"):
        build("detector", {"name": "multi-krum", "f": 0.5})


def test_flame_rejects_those_outside_the_majority() -> None:
    """See tests/aggregators/test_flame.py. The fourth is at a right angle to the first and the third."""
    x = [[2.0, 0], [2, 0.2], [4, 0], [0, 1], [-1, 0]]
    said = judged(Flame(of="update"), x, [50.0, 50])
    assert set(said.rejected) == {3, 4} and said.rejected[4] == "cosine distance to the majority is 2"
    near = 1 - 2 / 4.04**0.5
    torch.testing.assert_close(
        said.scores["apart"][[0, 1]], torch.tensor([near / 2, near], dtype=torch.float64), atol=1e-11, rtol=0
    )
    assert judged(Flame(), x[:2]).rejected == {}


def test_deepsight_rejects_what_is_about_one_class() -> None:
    layout = Layout.of(BackboneHead(nn.Linear(1, 1, bias=False), nn.Linear(1, 4, bias=False)), "head")
    tame, single = [0.0, 1, 1, 1, 1], [0.0, 2, 0, 0, 0]
    said = judged(DeepSight(), [tame, tame, tame, single, single], [1.0] * 5, layout=layout)
    reason = "100% of its cluster look poisoned; its update is about 1 classes"
    assert said.rejected == {3: reason, 4: reason}
    assert said.scores["homogeneity"].tolist() == [-4, -4, -4, -1, -1]


def test_models_that_are_not_finite_and_bans() -> None:
    x = [*LINE, [float("nan")]]
    detector = MultiKrum(f=1, action="ban", patience=2)
    first = judged(detector, x)
    assert set(first.rejected) == {4, 5} and first.rejected[5] == "model is not finite"
    assert first.scores["crowding"][5] == torch.inf
    second = judged(detector, x, state=first.state)
    assert second.rejected == {} and second.banned[4] == "Krum's score is 65, 2 rounds in a row"
    assert judged(detector, [[float("nan")]]).rejected == {0: "model is not finite"}


NAMES = ("flame", "deepsight", "multi-krum", "signguard", "alignins", "fldetector")
every_choice = pytest.mark.parametrize("name", NAMES)


@every_choice
def test_the_order_of_replies_does_not_matter(name: str) -> None:
    """Over four rounds, with a row that is far off in each."""
    detector = build("detector", {"name": name, **({"window": 1} if name == "fldetector" else {})})
    order = torch.tensor([3, 0, 6, 1, 8, 5, 2, 4, 7])
    here: State = detector.init()
    there = here
    for turn in range(4):
        x, model = Key(turn).normal(9, 12, dtype=torch.float64), Key(turn).fold("w").normal(12).double()
        x[4] = 1e30
        one = judged(detector, x, model, here, list(range(9)))
        other = judged(detector, x[order], model, there, order.tolist())
        assert (one.rejected, one.banned) == (other.rejected, other.banned)
        for key, score in one.scores.items():
            torch.testing.assert_close(score[order], other.scores[key], equal_nan=True)
        here, there = one.state, other.state


@every_choice
def test_one_client_and_clients_that_agree(name: str) -> None:
    detector = build("detector", {"name": name, **({"f": 0} if name == "multi-krum" else {})})
    for n in (1, 2, 5):
        said = judged(detector, torch.full((n, 6), 0.3), torch.ones(6))
        assert said.rejected == {} and said.banned == {}


def test_all_of_them_beside_a_personalised_method(simulate: Callable[..., Run]) -> None:
    detectors = [{"name": name, **({"samples": 20} if name == "deepsight" else {})} for name in NAMES]
    run = simulate(
        method="ditto",
        detectors=detectors,
        aggregator="median",
        attack={"name": "sign-flip", "fraction": 0.2},
        data={"clients": 12},
    )
    scores = {key.split("/")[2] for key in run.store.arrays(2) if key.startswith("verdict/scores/")}
    assert scores == set(NAMES) and run.round == 2
