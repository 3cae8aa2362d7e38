from __future__ import annotations

import pytest
import torch

from holdfast.aggregators import geometry
from holdfast.aggregators.geometry import blocks, cosines, cosines_between, distances, norms
from holdfast.core.keys import Key


def slow_distances(x: torch.Tensor) -> torch.Tensor:
    return (x.double()[:, None] - x.double()[None]).square().sum(dim=-1)


@pytest.mark.parametrize("offset", [0.0, 1.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_with_any_part_in_common(offset: float, dtype: torch.dtype) -> None:
    x = (Key(1).normal(12, 700, dtype=torch.float64) + offset).to(dtype)
    torch.testing.assert_close(distances(x), slow_distances(x), rtol=1e-4 if dtype == torch.float32 else 1e-8, atol=0)
    assert torch.equal(distances(x), distances(x).T)


def test_a_far_row_costs_the_others_no_digits() -> None:
    x = Key(1).normal(12, 700) + 30
    x[3], x[7] = 1e6, 1e30
    near = torch.tensor([i for i in range(12) if i not in (3, 7)])
    torch.testing.assert_close(distances(x)[near][:, near], slow_distances(x[near]), rtol=1e-4, atol=0)
    assert (distances(x)[7, near] > 1e60).all() and (distances(x)[3, near] > 1e12).all() and distances(x)[7, 7] == 0


def test_equal_rows_are_at_no_distance() -> None:
    x = Key(1).normal(1, 500).expand(4, 500)
    assert distances(x).max() < 1e-9 and torch.equal(distances(torch.zeros(3, 5)), torch.zeros(3, 3, dtype=torch.float64))


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
    expected = torch.tensor([[0.6, -0.8, 1.4 / 2**0.5], [0.0, 0.0, 0.0], [1.0, 0.0, 0.5**0.5], [0.5**0.5, -(0.5**0.5), 1.0]]).double()
    torch.testing.assert_close(cosines_between(x, y), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-7)
    assert cosines_between(x[:0], y).shape == (0, 3) and cosines_between(x, x).diagonal()[[0, 2, 3]].tolist() == pytest.approx([1, 1, 1])
