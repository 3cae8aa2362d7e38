from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast.aggregators.base import Reduced
from holdfast.aggregators.lasa import LASA
from holdfast.core.flat import Layout
from holdfast.core.keys import Key
from tests.checks.aggregator_cases import context_of

LAYOUT = Layout.of(nn.Linear(3, 2))  # a weight of 6 numbers and a bias of 2


def lasa(x: Tensor, f: int = 0, **settings: Any) -> Reduced:
    ctx = replace(context_of(x, assumed=f), layout=LAYOUT)
    return LASA(**settings)(x, torch.full((len(x),), 1 / len(x), dtype=x.dtype), {}, ctx)


def slow(x: np.ndarray, sparsity: float, radii: tuple[float, float], authors: bool) -> np.ndarray:
    """Client by client and tensor by tensor."""
    n, clipped, value = len(x), x.copy(), np.zeros(x.shape[1])
    lengths = [np.linalg.norm(row) for row in x]
    for row, length in zip(clipped, lengths, strict=True):
        row *= min(1, np.median(lengths) / length)
    for row in clipped:
        sparse = row[:6] if authors else row
        kept = int(len(sparse) * (1 - sparsity))
        smallest = sorted(abs(sparse))[-kept]
        sparse[abs(sparse) <= smallest if authors else abs(sparse) < smallest] = 0
    for part in (slice(0, 6), slice(6, 8)):
        measured = np.array(
            [
                [
                    np.linalg.norm(row[part]),
                    0.5 + 0.5 * np.sign(row[part]).sum() / max(1, (row[part] != 0).sum()),
                ]
                for row in clipped
            ]
        )
        off = abs(measured - np.median(measured, axis=0)) / (measured.std(axis=0) + 1e-12)
        limits = np.array(radii) + (-1e-9 if authors else 1e-9)
        usual = [i for i in range(n) if (off[i] < limits).all()]
        value[part] = clipped[usual].mean(axis=0)[part]
    return value


@pytest.mark.parametrize("variant", ["paper", "authors"])
@pytest.mark.parametrize(("sparsity", "radii"), [(0.3, (1.0, 1.0)), (0.5, (2.0, 1.5))])
def test_against_the_slow_reference(variant: Any, sparsity: float, radii: tuple[float, float]) -> None:
    for seed in range(5):
        x = Key(seed).normal(9, 8, dtype=torch.float64) + 0.7
        x[2] *= 9
        got = lasa(x, variant=variant, sparsity=sparsity, length_radius=radii[0], sign_radius=radii[1])
        expected = slow(x.numpy(), sparsity, radii, variant == "authors")
        assert not got.fallback
        np.testing.assert_allclose(got.value.numpy(), expected, atol=1e-12)


def test_each_tensor_has_clients_of_its_own() -> None:
    """Client 4 turns the weight around, client 0 the bias: each is left out of that tensor only, and the
    weights are shares of coordinates, 6 of 8 and 2 of 8."""
    x = torch.ones(5, 8, dtype=torch.float64)
    x[4, :6], x[0, 6:] = -1, -1
    got = lasa(x, sparsity=0)
    assert got.value.tolist() == [1.0] * 8
    torch.testing.assert_close(got.weights, torch.tensor([0.1875, 0.25, 0.25, 0.25, 0.0625]).double())


def test_the_smallest_entries_of_each_client_become_zero() -> None:
    """Of 8 entries int(8 * 0.75) = 6 stay, whatever tensor they are in; in the authors' code of the weight's
    6 int(6 * 0.75) = 4, of which the smallest goes, too."""
    x = torch.tensor([[8.0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.float64)
    assert lasa(x, sparsity=0.25).value.tolist() == [8, 0, 0, 3, 4, 5, 6, 7]
    assert lasa(x, sparsity=0.25, variant="authors").value.tolist() == [8, 0, 0, 0, 4, 5, 6, 7]


def test_a_tensor_without_a_usual_client_is_the_median_and_a_fallback() -> None:
    """Two clients are each one deviation from the median in between: a radius of less takes neither."""
    x = torch.tensor([[1.0] * 8, [3.0] * 8], dtype=torch.float64)
    got = lasa(x, sparsity=0, length_radius=0.5)
    assert got.fallback and got.value.tolist() == [2.0] * 8
    got = lasa(x, sparsity=0)  # the longer one, brought to the median length, and the other
    assert not got.fallback and got.value.tolist() == [1.5] * 8
