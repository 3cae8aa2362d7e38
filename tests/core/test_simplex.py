"""The quadratic programme on the simplex against trying every set of entries."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from holdfast.core.simplex import FLOOR, least


def tried(m: Tensor) -> float:
    """The least a^T M a: on every set of entries, where all have the same gradient."""
    best = float("inf")
    for size in range(1, len(m) + 1):
        for chosen in itertools.combinations(range(len(m)), size):
            a = torch.linalg.lstsq(
                m[list(chosen)][:, list(chosen)], torch.ones(size, 1, dtype=torch.float64)
            ).solution[:, 0]
            if float(a.sum().abs()) > 1e-12 and bool((a / a.sum() >= -1e-12).all()):
                whole = torch.zeros(len(m), dtype=torch.float64)
                whole[list(chosen)] = a / a.sum()
                best = min(best, float(whole @ m @ whole))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_weights_equal_those_of_brute_force(seed: int) -> None:
    torch.manual_seed(seed)
    n = 1 + seed % 6
    x = torch.randn(
        n, 1 + (seed * 7) % 8, dtype=torch.float64
    )  # also fewer columns than rows: a singular matrix
    m = x @ x.T + torch.diag(torch.rand(n, dtype=torch.float64) * (seed % 3))
    a = least(m)
    assert a is not None and bool((a >= 0).all()) and float(a.sum()) == pytest.approx(1)
    size = m.diagonal().sqrt()
    values, vectors = torch.linalg.eigh(m / size / size[:, None])
    lifted = (vectors * values.clamp(min=FLOOR * values.max())) @ vectors.T * size * size[:, None]
    assert float(a @ lifted @ a) == pytest.approx(tried(lifted), abs=1e-10 * float(m.diagonal().max()))


def test_weights_computed_by_hand() -> None:
    """Independent errors: weights as 1 / variance. One that can only do harm has none."""
    torch.testing.assert_close(
        least(torch.diag(torch.tensor([1.0, 2.0, 4.0]))),
        torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64) / 7,
    )
    torch.testing.assert_close(
        least(torch.tensor([[1.0, 2.0], [2.0, 5.0]])), torch.tensor([1.0, 0.0], dtype=torch.float64)
    )
    assert least(torch.tensor([[3.0]])).tolist() == [1.0]  # type: ignore[union-attr]


def test_a_matrix_that_is_not_positive_is_made_so() -> None:
    """(1, 2; 2, 1) has the eigenvalues 3 and -1: along (1, -1) it falls for ever, but by the clipped one both
    are alike."""
    a = least(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    assert a is not None and a.tolist() == pytest.approx([0.5, 0.5])
    torch.manual_seed(0)
    wild = torch.randn(9, 9, dtype=torch.float64)
    a = least(wild + wild.T)
    assert a is not None and bool((a >= 0).all()) and float(a.sum()) == pytest.approx(1)


@pytest.mark.parametrize("absurd", [1e3, 1e9, 1e30])
def test_one_absurd_entry_changes_nothing_between_the_others(absurd: float) -> None:
    """Errors of 1, 2 and 4 beside one without measure, which takes no part."""
    a = least(torch.diag(torch.tensor([1.0, 2.0, 4.0, absurd], dtype=torch.float64)))
    assert a is not None
    expected = torch.tensor([4.0, 2.0, 1.0, 4 / absurd], dtype=torch.float64)
    torch.testing.assert_close(a, expected / expected.sum(), rtol=0, atol=1e-9)


def test_a_client_without_error_gets_all_weight() -> None:
    a = least(torch.diag(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)))
    assert a is not None and a.tolist() == pytest.approx([1.0, 0.0, 0.0], abs=2 * FLOOR)
    a = least(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))  # not convex, and both alike
    assert a is not None and a.tolist() == pytest.approx([0.5, 0.5])


def test_equal_clients_get_equal_weights() -> None:
    assert least(torch.zeros(4, 4)).tolist() == [0.25] * 4  # type: ignore[union-attr]
    assert least(-torch.eye(2)).tolist() == [0.5] * 2  # type: ignore[union-attr]
    assert least(torch.tensor([[float("nan")]])) is None and least(torch.tensor([[float("inf")]])) is None
    assert least(torch.zeros(0, 0)).tolist() == []  # type: ignore[union-attr]


def test_small_changes_of_the_matrix_change_the_weights_little() -> None:
    torch.manual_seed(1)
    x = torch.randn(30, 5, dtype=torch.float64)  # singular
    a, b = least(x @ x.T), least(x @ x.T + 1e-14 * torch.randn(30, 30, dtype=torch.float64))
    assert a is not None and b is not None
    torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
