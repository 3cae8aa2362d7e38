from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.core.keys import Key
from holdfast.detectors.alignins import AlignIns, mz_scores
from holdfast.results.run import Run
from tests.detectors.judging import BACKDOOR, IID, SKEWED, excluded, judged, play


def test_mz_scores_by_hand() -> None:
    """Of 0, 0, 0 and 4 the median is 0 and the standard deviation the root of 3."""
    found = mz_scores(torch.tensor([0.0, 0, 0, 4], dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([0, 0, 0, 4 / 3**0.5], dtype=torch.float64))
    assert mz_scores(torch.ones(3)).tolist() == [0, 0, 0]


def test_the_direction_alignment_by_hand() -> None:
    """Cosines with the model (1, 0, 0, 0): 1, 1, 1 and 0; half of the entries are looked at, all of the
    majority's sign."""
    x = [[2.0, 0, 0, 0], [1, 0, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]]
    said = judged(AlignIns(top=0.25), [*x[:3], [0.0, 2, 0, 0]], [1.0, 0, 0, 0])
    assert set(said.rejected) == {3} and said.rejected[3] == "MZ score 2.31 of the direction alignment"
    assert said.scores["tda"].tolist() == pytest.approx([0, 0, 0, 1 / (3 / 16) ** 0.5])


def test_the_sign_alignment_by_hand() -> None:
    """The largest entry of the last update has not the majority's sign; its cosine with the model is that of
    the others."""
    x = [[1.0, 3, 0], [1, 3, 0], [1, 3, 0], [1, -3, 0]]
    said = judged(AlignIns(top=0.3), x, [1.0, 0, 0])
    assert set(said.rejected) == {3} and said.rejected[3] == "MZ score 2.31 of the sign alignment"
    assert said.scores["tda"].tolist() == [0, 0, 0, 0]
    assert judged(AlignIns(top=0.3, mpsa=3.0), x, [1.0, 0, 0]).rejected == {}
    assert judged(AlignIns(), x[:2], [1.0, 0, 0]).rejected == {}


def test_both_scores_against_the_slow_reference() -> None:
    x, model = Key(1).normal(7, 40, dtype=torch.float64), Key(2).normal(40, dtype=torch.float64)
    rows, reference = x.tolist(), model.tolist()

    def sign(v: float) -> int:
        return (v > 0) - (v < 0)

    def scores(values: list[float]) -> list[float]:
        middle, mean = sorted(values)[3], sum(values) / 7
        deviation = (sum((v - mean) ** 2 for v in values) / 7) ** 0.5
        return [abs(v - middle) / deviation for v in values]

    majority = [sign(sum(sign(row[i]) for row in rows)) for i in range(40)]
    cosines, agreeing = [], []
    for row in rows:
        dot = sum(a * b for a, b in zip(row, reference, strict=True))
        cosines.append(dot / (sum(a * a for a in row) * sum(b * b for b in reference)) ** 0.5)
        largest = sorted(range(40), key=lambda i: -abs(row[i]))[:12]
        agreeing.append(sum(sign(row[i]) == majority[i] for i in largest) / 12)
    said = judged(AlignIns(), x, model)
    assert said.scores["tda"].tolist() == pytest.approx(scores(cosines))
    assert said.scores["mpsa"].tolist() == pytest.approx(scores(agreeing))


@pytest.mark.slow
def test_backdoors_are_found_where_labels_are_spread_evenly(simulate: Callable[..., Run]) -> None:
    """The paper: backdoors are found, also where clients differ. Here the second part fails: with skewed
    labels about half of the attackers and of the honest clients are rejected, and the backdoor succeeds."""
    even, skewed = (simulate(**play(p, detectors=["alignins"], attack=BACKDOOR)) for p in (IID, SKEWED))
    attackers, honest = excluded(even)
    assert attackers > 0.95 and honest < 0.3 and even.final["attack/asr"] < 0.1
    attackers, honest = excluded(skewed)
    assert attackers < 0.8 and honest > 0.3 and skewed.final["attack/asr"] > 0.5
