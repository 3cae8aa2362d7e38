from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.mean import Mean
from holdfast.core.keys import Key
from holdfast.core.types import State
from holdfast.wrappers import gas
from holdfast.wrappers.gas import GradientSplitting, groups
from tests.checks.aggregator_cases import context_of, updates

SEEN: list[AggregationContext] = []


class Nearest(Aggregator):
    """The vector nearest to the mean: a rule that looks at whole vectors."""

    def least(self, f: int) -> int:
        return 2 * f + 3

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        SEEN.append(ctx)
        chosen = torch.nn.functional.one_hot((x - x.mean(0)).norm(dim=1).argmin(), len(x)).to(x.dtype)
        return Reduced(chosen @ x, chosen, state, fallback=ctx.assumed > 2)


def slow(x: Tensor, p: int, key: Key, rule: Aggregator) -> Tensor:
    """Each client's score, group by group and client by client."""
    order = key.fold("gas").hash(x.shape[1]).argsort()
    score = torch.zeros(len(x), dtype=torch.float64)
    for columns in order.tensor_split(min(p, x.shape[1])):
        part = x[:, columns]
        found = rule(part, torch.full((len(x),), 1 / len(x), dtype=x.dtype), {}, context_of(part)).value
        for i in range(len(x)):
            score[i] += (part[i] - found).norm()
    return score


@pytest.mark.parametrize("rule", [Nearest(f=3), Mean(f=3)], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(("d", "p"), [(23, 5), (24, 6), (6, 1000), (50, 1)])
@pytest.mark.parametrize("numbers", [1, 1 << 22])
def test_against_a_slow_reference(
    rule: Aggregator, d: int, p: int, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gas, "NUMBERS", numbers)  # one group at a time, or all
    x, w = updates(9, d)
    ctx = replace(context_of(x, assumed=3), key=Key(4))
    found = GradientSplitting(p=p)(rule)(x, w, {}, ctx)
    best = slow(x, p, Key(4), rule).argsort()[:6]
    assert sorted(found.weights.nonzero().flatten().tolist()) == sorted(best.tolist())
    torch.testing.assert_close(found.value, x[best].mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.weights[best], torch.full((6,), 1 / 6, dtype=torch.float64))


def test_a_poisoned_group_is_found_where_the_whole_vector_hides_it() -> None:
    """By hand: five clients agree but for one coordinate of client 2."""
    x = torch.zeros(5, 4)
    x[2, 1] = 1.0
    found = GradientSplitting(p=4)(Mean(f=1))(x, torch.full((5,), 0.2), {}, context_of(x, assumed=1))
    assert found.weights.tolist() == [0.25, 0.25, 0.0, 0.25, 0.25] and found.value.tolist() == [0.0] * 4


def test_the_split_is_even_complete_and_new_in_every_round() -> None:
    order = Key(1).hash(23).argsort()
    found = [row.tolist() for part in groups(order, 5, 3) for row in part]
    assert [len(row) for row in found] == [5, 5, 5, 4, 4] and sorted(sum(found, [])) == list(range(23))
    x, w = updates(9, 40)
    chosen = {
        str(
            GradientSplitting(p=9)(Nearest(f=4))(
                x, w, {}, replace(context_of(x, assumed=4), key=Key(k))
            ).weights
        )
        for k in range(10)
    }
    assert len(chosen) > 1


@pytest.mark.parametrize(("n", "f", "told"), [(9, 3, 3), (9, 4, 3), (4, 2, 0), (2, 1, 0)])
def test_the_number_of_attackers_that_the_rule_inside_assumes(n: int, f: int, told: int) -> None:
    SEEN.clear()
    x, w = updates(n, 10)
    found = GradientSplitting(p=3)(Nearest(f=f))(x, w, {}, context_of(x, assumed=f))
    assert {ctx.assumed for ctx in SEEN} == {told} and {ctx.layout.size for ctx in SEEN} == {3, 4}
    assert all(
        ctx.root is not None and len(ctx.root) == len(ctx.received) == ctx.layout.size for ctx in SEEN[-3:]
    )
    assert found.fallback == (told > 2) and int((found.weights > 0).sum()) == n - f


def test_too_few_clients() -> None:
    x = torch.tensor([[1.0], [3.0]])
    found = GradientSplitting()(Mean(f=2))(x, torch.tensor([0.1, 0.9]), {}, context_of(x, assumed=2))
    assert found.fallback and found.value.tolist() == [2.0] and found.weights.tolist() == [0.5, 0.5]


def test_a_row_too_long_to_be_squared_is_farther_than_the_others() -> None:
    x = updates(10)[0].float()
    x[[0, 1]] = 1e30
    found = GradientSplitting(p=3)(Mean(f=2))(x, torch.full((10,), 0.1), {}, context_of(x, assumed=2))
    assert (found.weights == 0).nonzero().flatten().tolist() == [0, 1]
