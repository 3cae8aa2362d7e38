from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.aggregators.base import Reduced
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.wrappers.foundation import scores
from tests.checks.aggregator_cases import context_of

X = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [4.0, 3.0]], dtype=torch.float64)
"""To (4, 3): 5, root 13, root 5, 0. To (0, 0): 0, root 2, root 8, 5. So the third is farthest from both."""


def apply(x: Tensor, rule: str, ids: Tensor | None = None, **settings: float) -> Reduced:
    inner = build("aggregator", {"name": rule, "f": 1})
    found = build("wrapper", {"name": "foundation", **settings})(inner)
    ctx = context_of(x, ids, 1)
    return found(x, torch.full((len(x),), 1 / len(x), dtype=x.dtype), {}, ctx)


def test_by_hand() -> None:
    torch.testing.assert_close(scores(X), torch.tensor([0, 2, 5, 0], dtype=torch.float64).sqrt())
    middle = apply(X, "median")  # of 0, 1, 2, 2, 2, 4 and of 0, 1, 2, 2, 2, 3
    assert middle.value.tolist() == [2.0, 2.0] and not middle.fallback
    mean = apply(X, "mean")
    torch.testing.assert_close(mean.value, torch.tensor([11.0, 10.0], dtype=torch.float64) / 6)
    torch.testing.assert_close(mean.weights, torch.tensor([1, 1, 3, 1], dtype=torch.float64) / 6)
    assert apply(X, "mean", copies=1).weights.tolist() == [0.2, 0.2, 0.4, 0.2]


def test_of_equal_scores_the_lowest_id_is_copied() -> None:
    x = X[[0, 2, 2, 3]]
    assert apply(x, "mean", torch.tensor([5, 9, 3, 4])).weights.argmax() == 2


def test_scores_against_a_slow_reference() -> None:
    x = Key(1).normal(9, 5, dtype=torch.float64)
    high, low = x.max(0).values, x.min(0).values
    slow = [min(float((row - high).norm()), float((row - low).norm())) for row in x]
    torch.testing.assert_close(scores(x), torch.tensor(slow, dtype=torch.float64))


def test_an_update_that_is_far_in_both_directions_is_the_one_that_is_copied() -> None:
    """The weakness of the score: with two of six, the median alone holds, but not with three copies."""
    far = torch.tensor([[1e3, -1e3], [1e3, -1e3]], dtype=torch.float64)
    x = torch.cat([X - 2, far])
    assert x.quantile(0.5, dim=0).abs().max() < 5
    assert apply(x, "median").value.tolist() == [1e3, -1e3]


@pytest.mark.slow
def test_the_papers_claim_holds_under_min_max_and_not_under_boosted_backdoors(tmp_path: Path) -> None:
    """Fang et al., section VI: copies make trimmed mean and median hold where they did not alone. So it is
    under min-max; a boosted update, and large updates in the wrong direction, are copied themselves."""
    from tests.defence_plays import BOOSTED, played

    rules = [
        {"name": name, "f": 0.3, "wrap": wrap}
        for name in ("trimmed-mean", "median")
        for wrap in ([], ["foundation"])
    ]
    attack = {"name": "min-max", "knows": "everyone", "fraction": 0.3}
    trimmed, trimmed_more, median, median_more = (
        one["accuracy"] for one in played(tmp_path / "min-max", rules, attack)
    )
    assert trimmed_more > trimmed and median_more > median
    *_, median_alone, copied = played(tmp_path / "boosted", rules, BOOSTED)
    assert median_alone["attack/asr"] < 0.1 and copied["attack/asr"] > 0.9
    flipped = played(tmp_path / "flipped", rules, {"name": "sign-flip", "fraction": 0.3, "scale": 5.0})
    assert flipped[1]["accuracy"] < flipped[0]["accuracy"] and flipped[3]["accuracy"] < flipped[2]["accuracy"]
