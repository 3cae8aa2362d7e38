from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.core.keys import Key
from holdfast.detectors.signguard import SignGuard
from holdfast.results.run import Run
from tests.detectors.judging import IID, excluded, judged, play

UP, DOWN = [1.0, 1, 1, -1], [-1.0, -1, -1, 1]


def test_by_hand() -> None:
    """Shares of positive, zero and negative entries: 3/4, 0, 1/4 of the first four, 1/4, 0, 3/4 of the last.
    The mean of the cluster is that of its members."""
    said = judged(SignGuard(share=1.0), [UP, UP, UP, UP, DOWN], [9.0, 9, 9, 9])
    assert set(said.rejected) == {4} and said.rejected[4].startswith("signs are 0.707 from those of")
    torch.testing.assert_close(
        said.scores["signs"], torch.tensor([0, 0, 0, 0, 0.5 * 2**0.5], dtype=torch.float64)
    )


def test_long_and_short_updates() -> None:
    x = [UP, UP, UP, [3.1 * v for v in UP], [0.09 * v for v in UP]]
    said = judged(SignGuard(share=1.0), x)
    assert said.rejected == {3: "update of 3.1 median lengths", 4: "update of 0.09 median lengths"}
    assert said.scores["length"].tolist() == pytest.approx([1, 1, 1, 3.1, 1 / 0.09])
    assert judged(SignGuard(share=1.0, low=0.05, high=4.0), x).rejected == {}
    assert judged(SignGuard(), x[:2]).rejected == {}


def test_the_statistics_against_the_slow_reference() -> None:
    models = Key(4).normal(6, 50, dtype=torch.float64).round()
    reference = Key(5).normal(50, dtype=torch.float64).round()
    for settings in ({}, {"variant": "authors"}):
        detector, key = SignGuard(share=0.4, **settings), Key(7)
        chosen = detector._coordinates(models, key).nonzero().flatten().tolist()
        assert 10 <= len(chosen) <= 30
        expected = []
        for model in models.tolist():
            change = [model[i] - float(reference[i]) for i in chosen]
            signs = [sum(v > 0 for v in change), sum(v == 0 for v in change), sum(v < 0 for v in change)]
            expected.append([count / len(chosen) for count in signs])
        if settings:
            assert chosen == list(range(chosen[0], chosen[0] + 20))
            most = [max(row[i] for row in expected) for i in range(3)]
            expected = [[row[i] / max(most[i], 1e-8) for i in range(3)] for row in expected]
        found = detector.statistics(models, reference, key)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_directions_and_distances_as_a_further_statistic() -> None:
    """The signs of the last are those of the others; its direction is not, and it is far away."""
    x = [[1.0, 1, 1, -0.1]] * 4 + [[0.1, 0.1, 0.1, -1.6]]
    assert judged(SignGuard(share=1.0), x).rejected == {}
    for similarity in ("cosine", "distance"):
        assert set(judged(SignGuard(share=1.0, similarity=similarity), x).rejected) == {4}


@pytest.mark.slow
def test_lies_within_the_spread_are_found_by_their_signs(simulate: Callable[..., Run]) -> None:
    """The paper: LIE and Min-Max pass other filters, but not this one. With cosines (SignGuard-Sim) fewer
    honest clients are rejected; without an attack a third of them are."""
    for attack in ("lie", "min-max"):
        bad = {"name": attack, "fraction": 0.2}
        plain, similar = (
            excluded(simulate(**play(IID, attack=bad, detectors=[{"name": "signguard", "similarity": how}])))
            for how in ("none", "cosine")
        )
        assert plain[0] > 0.8 and similar[0] > 0.95 and similar[1] <= plain[1] < 0.2
    honest = excluded(simulate(**play(IID, detectors=["signguard"])))[1]
    assert 0.2 < honest < 0.5
