from __future__ import annotations

from itertools import combinations

import pytest
import torch

from holdfast.core.keys import Key
from tests.checks.aggregator_cases import apply


def even(n: int) -> torch.Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float64)


def diameter(x: torch.Tensor, rows: tuple[int, ...]) -> float:
    return max((float((x[i] - x[j]).norm()) for i, j in combinations(rows, 2)), default=0.0)


def test_by_hand() -> None:
    """On a line at 0, 1, 3, 10, 11: of three the first ones span 3; of four, 0 to 10 and 1 to 11 span 10
    each, and the lowest ids win."""
    x = torch.tensor([[0.0], [1.0], [3.0], [10.0], [11.0]], dtype=torch.float64)
    assert apply("mda", x, even(5), f=2).weights.tolist() == [1 / 3, 1 / 3, 1 / 3, 0, 0]
    got = apply("mda", x, even(5), f=1)
    assert got.value.tolist() == [3.5] and got.weights.tolist() == [0.25] * 4 + [0] and not got.fallback
    assert apply("mda", x, even(5), torch.tensor([4, 3, 2, 1, 0]), f=1).value.tolist() == [25 / 4]


@pytest.mark.parametrize(("n", "f"), [(3, 1), (7, 0), (7, 2), (11, 5), (12, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_against_all_choices(n: int, f: int, seed: int) -> None:
    x = Key(seed).fold(n).normal(n, 3, dtype=torch.float64)
    x[n // 2] = x[0]  # choices that are equally good
    best = min(combinations(range(n), n - f), key=lambda rows: round(diameter(x, rows), 9))
    got = apply("mda", x, even(n), f=f)
    assert tuple(got.weights.nonzero().flatten().tolist()) == best and not got.fallback
    torch.testing.assert_close(got.value, x[list(best)].mean(dim=0))


def test_a_search_that_is_given_up_is_a_fallback_of_at_most_twice_the_diameter() -> None:
    for seed in range(10):
        x = Key(seed).normal(12, 3, dtype=torch.float64)
        best, got = apply("mda", x, even(12), f=4), apply("mda", x, even(12), f=4, limit=0)
        spans = [diameter(x, tuple(each.weights.nonzero().flatten().tolist())) for each in (best, got)]
        assert got.fallback and spans[0] <= spans[1] <= 2 * spans[0]
        assert got.weights.count_nonzero() == 8


def test_a_hundred_clients_of_which_thirty_are_far_from_each_other_need_no_fallback() -> None:
    """C(100, 30) is 2.9e25, of which the search looks at few."""
    x = Key(5).normal(100, 50, dtype=torch.float64)
    x[10:40] *= 3 + torch.arange(30, dtype=torch.float64)[:, None]
    got = apply("mda", x, even(100), f=30)
    assert not got.fallback and not got.weights[10:40].any()
    torch.testing.assert_close(got.value, x[[*range(10), *range(40, 100)]].mean(dim=0))


def test_an_attack_inside_the_diameter_moves_the_mean_by_no_more_than_it() -> None:
    """The claim behind MDA: all that is averaged lies within an honest
    diameter of an honest update, so the mean does, wherever attackers are."""
    for seed, size in ((0, 0.5), (1, 2.0), (2, 100.0)):
        x = Key(seed).normal(15, 20, dtype=torch.float64)
        x[:4] = x[4:].mean(dim=0) + size * Key(seed).fold("push").normal(20, dtype=torch.float64)
        honest = x[4:]
        moved = (apply("mda", x, even(15), f=4).value - honest.mean(dim=0)).norm()
        assert moved <= diameter(honest, tuple(range(11)))
