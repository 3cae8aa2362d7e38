from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.aggregators.mean import Mean
from holdfast.core.errors import ConfigError
from holdfast.wrappers.nnm import NearestNeighbourMixing
from tests.checks.aggregator_cases import context_of, updates
from tests.helpers import tiny
from tests.wrappers.recording_aggregator import Look

LINE = torch.tensor([[0.0], [1.0], [3.0], [100.0]])
EVEN = torch.full((4,), 0.25)


def test_by_hand() -> None:
    look = Look(seen=[], f=1)
    found = NearestNeighbourMixing()(look)(LINE, EVEN, {}, context_of(LINE, assumed=1))
    mixed = look.seen[0][0]
    torch.testing.assert_close(
        mixed.flatten(), torch.tensor([4 / 3, 4 / 3, 4 / 3, 104 / 3])
    )  # three nearest each
    torch.testing.assert_close(found.weights, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0]))
    assert torch.equal(look.seen[0][1], EVEN) and not found.fallback
    NearestNeighbourMixing(f=0.5)(look)(LINE, EVEN, {}, context_of(LINE))
    assert look.seen[1][0].flatten().tolist() == [0.5, 0.5, 2.0, 51.5]  # two nearest each, by its own f


def test_against_a_slow_reference() -> None:
    x, w = updates(9)
    look = Look(seen=[])
    NearestNeighbourMixing(f=3)(look)(x, w, {}, context_of(x))
    for i in range(9):
        nearest = sorted(range(9), key=lambda j: float((x[i] - x[j]).norm()))[:6]
        assert i in nearest
        torch.testing.assert_close(look.seen[0][0][i], x[nearest].mean(0), rtol=0, atol=1e-12)


def test_equally_near_ones_are_taken_by_id() -> None:
    x = torch.tensor([[0.0], [1.0], [-1.0]])
    for ids, other in (([4, 6, 8], 0.5), ([4, 8, 6], -0.5)):
        look = Look(seen=[])
        NearestNeighbourMixing(f=1)(look)(x, torch.full((3,), 1 / 3), {}, context_of(x, torch.tensor(ids)))
        assert look.seen[0][0][0].item() == other


def test_an_equal_update_does_not_replace_the_clients_own() -> None:
    x = torch.tensor([[5.0], [5.0], [1.0]])
    found = NearestNeighbourMixing(f=2)(Mean())(x, torch.tensor([0.2, 0.3, 0.5]), {}, context_of(x))
    torch.testing.assert_close(found.weights, torch.tensor([0.2, 0.3, 0.5]))


def test_too_few_clients() -> None:
    found = NearestNeighbourMixing(f=4)(Mean())(LINE, EVEN, {}, context_of(LINE))
    assert found.fallback and found.value.item() == 26.0


@pytest.mark.parametrize(
    ("table", "condition"),
    [
        ({"name": "mean", "f": 30, "wrap": ["nnm"]}, "n > f"),
        ({"name": "mean", "wrap": [{"name": "nnm", "f": 30}]}, "n > 30"),
    ],
)
def test_more_than_a_full_cohort_cannot_be_left_out(table: dict[str, Any], condition: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"aggregator 'nnm\(mean\)' needs n >= 1 and {condition}, but a cohort has n = 5 clients",
    ):
        tiny(aggregator=table).parts()
