from __future__ import annotations

import pytest
import torch

from holdfast.aggregators.foolsgold import FoolsGold, weights_of
from holdfast.aggregators.geometry import cosines
from holdfast.core.keys import Key
from tests.aggregators import slow
from tests.checks.aggregator_cases import apply, context_of

X = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 2.0, 0.0]], dtype=torch.float64)
W = torch.full((4,), 0.25, dtype=torch.float64)


def test_copies_lose_their_weight() -> None:
    got = apply("foolsgold", X, W)
    assert (
        got.weights.tolist() == [0.5, 0.5, 0, 0] and got.value.tolist() == [0.5, 0, 0.5] and not got.fallback
    )
    assert apply("foolsgold", X, W, divide_by="nothing").value.tolist() == [1, 0, 1]
    assert apply("foolsgold", X, W, divide_by="kept").value.tolist() == [0.5, 0, 0.5]


def test_against_the_slow_reference() -> None:
    for seed in range(8):
        alike = cosines(Key(seed).normal(6, 3, dtype=torch.float64))
        torch.testing.assert_close(
            weights_of(alike), slow.tensor(slow.foolsgold(alike.tolist())), rtol=0, atol=1e-9
        )


def test_everyone_alike_is_the_mean() -> None:
    x = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    got = apply("foolsgold", x, torch.full((3,), 1 / 3))
    torch.testing.assert_close(got.value, x[1])
    assert got.fallback


def test_memory_is_by_client_and_grows() -> None:
    rule, w = FoolsGold(), torch.full((2,), 0.5, dtype=torch.float64)
    first = rule(X[:2], w, {}, context_of(X[:2], torch.tensor([7, 2])))
    assert first.state["ids"].tolist() == [2, 7] and torch.equal(first.state["history"], X[[1, 0]])
    before = first.state["history"].clone()
    second = rule(X[1:3], w, first.state, context_of(X[1:3], torch.tensor([5, 7])))
    assert second.state["ids"].tolist() == [2, 5, 7]
    assert second.state["history"].tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 0]] and torch.equal(
        first.state["history"], before
    )


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_memory_shares_no_tensors_with_its_inputs(order: list[int]) -> None:
    """The same clients in two rounds, in any order: what was remembered is a sum of its own, whatever becomes
    of the updates."""
    rule, rows = FoolsGold(), torch.tensor(order)
    sent = [X[rows].clone(), (2 * X)[rows].clone()]
    first = rule(sent[0], W, {}, context_of(sent[0], rows))
    second = rule(sent[1], W, first.state, context_of(sent[1], rows))
    for tensor in (*sent, first.state["history"]):
        tensor.zero_()
    assert torch.equal(second.state["history"], 3 * X) and second.state["ids"].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(
        second.weights, weights_of(cosines(3 * X))[rows] / weights_of(cosines(3 * X)).sum()
    )


def test_earlier_updates_count_only_with_memory() -> None:
    """Two clients that differ today but said the same for long."""
    w, today = torch.full((3,), 1 / 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    past = {
        "ids": torch.arange(3),
        "history": torch.tensor([[0, 0, 90.0], [0, 0, 90.0], [90.0, 0, 0]], dtype=torch.float64),
    }
    kept = FoolsGold()(today, w, past, context_of(today)).weights
    assert kept[0] == kept[1] == 0 and kept[2] == 1
    alone = FoolsGold(memory=False)(today, w, {}, context_of(today))
    torch.testing.assert_close(alone.weights, w)
    assert alone.state == {}


def test_twins_whose_sums_overflow_are_still_twins() -> None:
    x = Key(1).normal(6, 40)
    x[0] = x[1] = 2e38 * x[0].sign()
    rule, state, w = FoolsGold(), {}, torch.full((6,), 1 / 6)
    for _ in range(3):
        got = rule(x, w, state, context_of(x))
        state = got.state
        assert got.weights[:2].tolist() == [0, 0] and (got.weights[2:] > 0).all()


@pytest.mark.parametrize("n", [3, 7, 16])
def test_rounding_errors_of_twins_give_no_client_all_the_weight(n: int) -> None:
    for d in (7, 33, 1001):
        x = Key(n).fold(d).normal(1, d) * torch.linspace(1, 2, n)[:, None]
        got = apply("foolsgold", x, torch.full((n,), 1 / n))
        assert got.fallback and torch.allclose(got.weights, torch.full((n,), 1 / n))
