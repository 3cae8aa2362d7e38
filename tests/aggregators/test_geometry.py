from __future__ import annotations

import pytest
import torch

from holdfast.aggregators import geometry
from holdfast.aggregators.geometry import (
    blocks,
    cosines,
    cosines_between,
    deviation,
    distances,
    norms,
    seen_from,
    to_mixture,
)
from holdfast.core.keys import Key


def slow_distances(x: torch.Tensor) -> torch.Tensor:
    return (x.double()[:, None] - x.double()[None]).square().sum(dim=-1)


@pytest.mark.parametrize("offset", [0.0, 1.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_with_any_part_in_common(offset: float, dtype: torch.dtype) -> None:
    x = (Key(1).normal(12, 700, dtype=torch.float64) + offset).to(dtype)
    torch.testing.assert_close(
        distances(x), slow_distances(x), rtol=1e-4 if dtype == torch.float32 else 1e-8, atol=0
    )
    assert torch.equal(distances(x), distances(x).T)


def test_a_far_row_costs_the_others_no_digits() -> None:
    x = Key(1).normal(12, 700) + 30
    x[3], x[7] = 1e6, 1e30
    near = torch.tensor([i for i in range(12) if i not in (3, 7)])
    torch.testing.assert_close(distances(x)[near][:, near], slow_distances(x[near]), rtol=1e-4, atol=0)
    assert (
        (distances(x)[7, near] > 1e60).all()
        and (distances(x)[3, near] > 1e12).all()
        and distances(x)[7, 7] == 0
    )


def test_equal_rows_are_at_no_distance() -> None:
    x = Key(1).normal(1, 500).expand(4, 500)
    assert distances(x).max() < 1e-9 and torch.equal(
        distances(torch.zeros(3, 5)), torch.zeros(3, 3, dtype=torch.float64)
    )


def test_cosines() -> None:
    x = torch.tensor([[1.0, 0.0], [3e30, 3e30], [0.0, 0.0], [-2.0, 0.0]])
    half = 2**-0.5
    wanted = [[1, half, 0, -1], [half, 1, 0, -half], [0, 0, 1, 0], [-1, -half, 0, 1]]
    torch.testing.assert_close(cosines(x), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-6)


def test_norms_and_blocks() -> None:
    x = torch.tensor([[3.0, 4.0], [1e30, 0.0]])
    torch.testing.assert_close(norms(x), torch.tensor([5.0, 1e30], dtype=torch.float64))
    assert norms(x, torch.tensor([3.0, 0.0]))[0] == 4
    x = Key(1).normal(3, 10, dtype=torch.float64)
    assert torch.allclose(norms(x), x.norm(dim=1)) and torch.allclose(norms(x, x[0]), (x - x[0]).norm(dim=1))


def test_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "BLOCK", 30)
    assert [(s.start, s.stop) for s in blocks(torch.zeros(10, 7))] == [(0, 3), (3, 6), (6, 7)]
    assert len(list(blocks(torch.zeros(10, 7), times=10))) == 7 and list(blocks(torch.zeros(5, 0))) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cosines_between_two_sets_of_rows(dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e30, 0.0], [1e-30, 1e-30]], dtype=dtype)
    y = torch.tensor([[1.0, 0.0], [0.0, -2.0], [3e38, 3e38]], dtype=dtype)
    expected = torch.tensor(
        [[0.6, -0.8, 1.4 / 2**0.5], [0.0, 0.0, 0.0], [1.0, 0.0, 0.5**0.5], [0.5**0.5, -(0.5**0.5), 1.0]]
    ).double()
    torch.testing.assert_close(
        cosines_between(x, y), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-7
    )
    assert cosines_between(x[:0], y).shape == (0, 3) and cosines_between(x, x).diagonal()[
        [0, 2, 3]
    ].tolist() == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("block", [1 << 19, 30])
def test_deviation(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "BLOCK", block)
    x = Key(1).normal(9, 50) * 3 + 100
    torch.testing.assert_close(deviation(x), x.double().std(0).float(), rtol=1e-5, atol=0)
    assert deviation(torch.tensor([[0.0, 7.0], [2.0, 7.0], [4.0, 7.0]])).tolist() == [2.0, 0.0]
    for n in (2, 3, 7, 20):
        for dtype in (torch.float32, torch.float64):
            alike = Key(n).normal(1, 200, dtype=dtype).expand(n, -1)
            assert not deviation(alike).any(), "rows that do not differ deviate by nothing at all"
    torch.testing.assert_close(deviation(torch.tensor([[1e-23], [3e-23], [2e-23]])), torch.tensor([1e-23]))
    far = torch.tensor([[1e30, 0.0], [-1e30, 1.0]])  # whose squares no float32 holds
    torch.testing.assert_close(deviation(far), torch.tensor([2**0.5 * 1e30, 0.5**0.5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_how_far_all_are_from_a_point_between_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "BLOCK", 70)
    x = (Key(1).normal(8, 200, dtype=torch.float64) + 5).to(dtype)
    weights = Key(2).uniform(8, dtype=torch.float64)
    weights /= weights.sum()
    wanted = (x.double() - weights @ x.double()).square().sum(1)
    for centre in (torch.zeros(200, dtype=dtype), x.mean(0), x[3]):
        seen = seen_from(x, centre)
        torch.testing.assert_close(seen.diagonal(), (x.double() - centre).square().sum(1))
        found, exact = to_mixture(seen, weights)
        assert bool(exact)
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=0)


def test_distances_below_the_rounding_error_are_not_returned() -> None:
    x = Key(1).normal(4, 200, dtype=torch.float64)
    alone = torch.tensor(
        [1.0, 0.0, 0.0, 0.0], dtype=torch.float64
    )  # the first row itself: its distance is nothing but rounding
    assert not to_mixture(seen_from(x, x.mean(0)), alone)[1]
    x[3] *= 1e9  # from its neighbourhood, the others look like one
    even = torch.tensor([0.4, 0.3, 0.3, 0.0], dtype=torch.float64)
    assert not to_mixture(seen_from(x, x[3]), even)[1] and to_mixture(seen_from(x, x[0]), even)[1]
