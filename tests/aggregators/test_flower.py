"""Flower's own rules as oracles: the same updates, aggregated by its server strategies' functions."""

from __future__ import annotations

import pytest
import torch

from holdfast.core.keys import Key
from tests.checks.aggregator_cases import apply

flower = pytest.importorskip("flwr.server.strategy.aggregate")


@pytest.fixture
def x() -> torch.Tensor:
    return Key(31).normal(11, 15, dtype=torch.float64)


def ours(name: str, x: torch.Tensor, **settings: object) -> torch.Tensor:
    return apply(name, x, torch.full((len(x),), 1 / len(x), dtype=torch.float64), **settings).value


def results(x: torch.Tensor) -> list:
    return [([row.numpy()], 5) for row in x]


def theirs(arrays: list) -> torch.Tensor:
    return torch.as_tensor(arrays[0])


@pytest.mark.parametrize("n", [1, 2, 10, 11])
def test_fed_median(x: torch.Tensor, n: int) -> None:
    torch.testing.assert_close(ours("median", x[:n]), theirs(flower.aggregate_median(results(x[:n]))))


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
def test_fed_trimmed_avg(x: torch.Tensor, share: float) -> None:
    torch.testing.assert_close(
        ours("trimmed-mean", x, f=share), theirs(flower.aggregate_trimmed_avg(results(x), share))
    )


@pytest.mark.parametrize("f", [0, 1, 4])
def test_krum(x: torch.Tensor, f: int) -> None:
    assert torch.equal(ours("krum", x, f=f), theirs(flower.aggregate_krum(results(x), f, 0)))


@pytest.mark.parametrize("f", [0, 1, 4])
def test_multi_krum(x: torch.Tensor, f: int) -> None:
    torch.testing.assert_close(
        ours("multi-krum", x, f=f), theirs(flower.aggregate_krum(results(x), f, len(x) - f))
    )


@pytest.mark.parametrize("f", [0, 1, 2])
def test_bulyan(x: torch.Tensor, f: int) -> None:
    torch.testing.assert_close(
        ours("bulyan", x, f=f),
        theirs(flower.aggregate_bulyan(results(x), f, flower.aggregate_krum, to_keep=0)),
    )
