from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.aggregators import rflbat
from holdfast.aggregators.geometry import distances
from holdfast.core.keys import Key
from holdfast.core.registry import build
from tests.checks.aggregator_cases import apply

HONEST = torch.tensor(
    [[1.0, 0.5], [0.5, 1.0], [1.0, -0.2], [-0.2, 1.0], [0.8, 0.8], [0.3, -0.4], [-0.5, 0.2], [0.1, 0.9]],
    dtype=torch.float64,
)
ALIKE = torch.tensor(
    [[9.0, 9.0], [9.01, 9.0], [9.0, 9.01], [9.01, 9.01], [9.02, 9.0], [9.0, 9.02]], dtype=torch.float64
)
W = torch.arange(1, 15, dtype=torch.float64) / 105


def test_clients_that_resemble_one_another_are_left_out() -> None:
    """Of the others one cluster stays, that of the smallest cosines."""
    x = torch.cat([HONEST, ALIKE])
    got = apply("rflbat", x, W)
    kept = torch.tensor([0, 2, 4, 5])
    assert got.weights.nonzero().flatten().tolist() == kept.tolist() and not got.fallback
    torch.testing.assert_close(got.weights[kept], W[kept] / W[kept].sum())
    torch.testing.assert_close(got.value, (W[kept] / W[kept].sum()) @ x[kept])


def test_attackers_who_differ_more_than_the_honest_win() -> None:
    honest = torch.tensor([[-1.0, 0.01 * i] for i in range(8)], dtype=torch.float64)
    apart = torch.tensor(
        [[9.0, -9.0], [9.5, -2.0], [7.0, -9.5], [2.0, -9.0], [8.0, -4.0], [4.0, -8.0]], dtype=torch.float64
    )
    assert not apply("rflbat", torch.cat([honest, apart]), W).weights[:8].any()


def test_one_that_is_far_off_is_left_out_before_clusters_are_made() -> None:
    """Of 13 it has 12 times the median sum of distances."""
    x = 0.01 * Key(1).normal(13, 4, dtype=torch.float64)
    x[5] = 1e3
    got = apply("rflbat", x, torch.full((13,), 1 / 13, dtype=torch.float64), most=1)
    assert got.weights[5] == 0 and int((got.weights > 0).sum()) == 12
    assert apply("rflbat", x, got.weights, most=1, far=13, near=13).weights[5] == 0  # it had no weight
    assert apply("rflbat", x, torch.full_like(got.weights, 1 / 13), most=1, far=13, near=13).weights[5] > 0


def test_the_plane_is_that_of_the_first_two_principal_components() -> None:
    x = Key(4).normal(8, 5, dtype=torch.float64)
    found = rflbat.principal_plane(distances(x).numpy())
    centred = (x - x.mean(0)).numpy()
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    expected = left[:, :2] * sizes[:2]
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-8)
    assert (found[np.abs(found).argmax(0), [0, 1]] > 0).all()


def slow(x: Tensor, rule: Any) -> list[int]:
    """The steps of the paper on the updates themselves, with the k-means and the references of the rule."""
    centred = (x - x.mean(0)).numpy()
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    plane = centred @ axes[:2].T
    plane *= np.sign(plane[np.abs(plane).argmax(0), [0, 1]])

    def near(members: list[int], times: float) -> list[int]:
        sums = [sum(float(np.linalg.norm(plane[i] - plane[j])) for j in members) for i in members]
        return [i for i, s in zip(members, sums, strict=True) if s <= times * float(np.median(sums))]

    left = near(list(range(len(x))), rule.far)
    points = (plane[left] - plane[left].min(0)) / (plane[left].max(0) - plane[left].min(0))
    points = points.round(9)
    found = [rflbat.k_means(points, k) for k in range(1, min(rule.most, len(left)) + 1)]
    drawn = [rflbat._references(len(left), k, rule.references) for k in range(1, len(found) + 1)]
    gaps = [mean - np.log(spread) for (mean, _), (_, spread) in zip(drawn, found, strict=True)]
    k = next(k for k in range(len(gaps)) if k + 1 == len(gaps) or gaps[k] >= gaps[k + 1] - drawn[k + 1][1])
    clusters: dict[int, list[int]] = {}
    for i, label in zip(left, found[k][0], strict=True):
        clusters.setdefault(int(label), []).append(i)

    def alike(members: list[int]) -> float:
        means = [
            float(np.mean([float(torch.cosine_similarity(x[i], x[j], dim=0)) for j in members if j != i]))
            for i in members
            if len(members) > 1
        ]
        return float(np.median(means)) if means else 1.0

    return near(min(clusters.values(), key=alike), rule.near)


@pytest.mark.parametrize("seed", range(4))
def test_against_a_slow_reference(seed: int) -> None:
    key, rule = Key(seed), build("aggregator", "rflbat")
    x = key.normal(12, 6, dtype=torch.float64)
    x[8:] = 5 + 0.3 * x[8:]
    weights = apply("rflbat", x, torch.full((12,), 1 / 12, dtype=torch.float64)).weights
    assert weights.nonzero().flatten().tolist() == slow(x, rule)


def test_updates_that_are_all_too_long_are_left_to_the_median() -> None:
    x = torch.tensor([[1e30, 0.0], [0.0, 1e30], [-1e30, 0.0]])
    assert apply("rflbat", x, torch.full((3,), 1 / 3)).fallback


@pytest.mark.parametrize("n", [1, 2])
def test_fewer_than_three_are_left_to_the_median(n: int) -> None:
    """And not to the weighted mean, which one of them would win by claiming many samples."""
    x = torch.tensor([[1.0, 2.0], [-100.0, 4.0]], dtype=torch.float64)[:n]
    got = apply("rflbat", x, torch.tensor([0.1, 0.9], dtype=torch.float64)[:n])
    assert got.fallback and torch.equal(got.value, x.mean(dim=0))


@pytest.mark.slow
def test_the_papers_claim_holds_for_boosted_updates_and_not_for_plain_ones(tmp_path: Path) -> None:
    """Wang et al., section 4: backdoors are kept out for any number of attackers. So it is for boosted
    updates; those of 30 % who train on a patch like everybody else pass."""
    from tests.defence_plays import BOOSTED, PATCH, played

    for attack, kept_out in ((BOOSTED, True), (PATCH, False)):
        mean, found = played(tmp_path / attack["name"], ["mean", "rflbat"], attack)
        assert mean["attack/asr"] > 0.9 and (found["attack/asr"] < 0.2) == kept_out
        assert found["accuracy"] > 0.9
