from __future__ import annotations

import torch

from holdfast.core.keys import Key
from tests.checks.aggregator_cases import apply


def planted() -> tuple[torch.Tensor, torch.Tensor]:
    x = Key(11).normal(12, 40, dtype=torch.float64)
    x[[2, 5, 7]] += 3
    return x, torch.full((12,), 1 / 12, dtype=torch.float64)


def test_one_look_against_a_singular_value_decomposition() -> None:
    x, w = planted()
    centred = x - x.mean(dim=0)
    scores = (centred @ torch.linalg.svd(centred).Vh[0]).square()
    kept = scores.argsort()[:9].sort().values
    got = apply("dnc", x, w, f=3)
    assert torch.equal(got.weights.nonzero().flatten(), kept) and kept.tolist() == [
        0,
        1,
        3,
        4,
        6,
        8,
        9,
        10,
        11,
    ]
    torch.testing.assert_close(got.value, x[kept].mean(dim=0))


def test_an_update_that_is_left_out_once_stays_out() -> None:
    x, w = planted()
    looks = [
        set(apply("dnc", x, w, f=3, coordinates=4, iterations=i).weights.nonzero().flatten().tolist())
        for i in (1, 2, 3)
    ]
    assert looks[0] > looks[2] and looks[0] >= looks[1] >= looks[2] and len(looks[0]) == 9


def test_no_update_left_is_a_fallback() -> None:
    x, w = planted()
    got = apply(
        "dnc", x, w, f=5, c=2.0, coordinates=2, iterations=60
    )  # two are left by each look, and never the same two
    torch.testing.assert_close(got.value, x.quantile(0.5, dim=0))
    assert got.fallback


def test_without_attackers_it_is_the_mean() -> None:
    x, w = planted()
    torch.testing.assert_close(apply("dnc", x, w).value, x.mean(dim=0))
