from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from holdfast.aggregators.mean import Mean
from holdfast.aggregators.multi_krum import MultiKrum
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.wrappers.bucketing import Bucketing, shares
from tests.checks.aggregator_cases import context_of, updates
from tests.wrappers.recording_aggregator import Look


def members(n: int, s: int, key: Key) -> list[list[int]]:
    """Which clients share a bucket, told from vectors that are unit vectors."""
    look = Look(seen=[])
    x = torch.eye(n)
    Bucketing(s=s)(look)(x, torch.full((n,), 1 / n), {}, replace(context_of(x), key=key))
    return [row.nonzero().flatten().tolist() for row in look.seen[0][0]]


def test_every_client_is_in_one_bucket_of_s() -> None:
    found = members(7, 2, Key(3))
    assert [len(one) for one in found] == [2, 2, 2, 1] and sorted(sum(found, [])) == list(range(7))
    assert found == members(7, 2, Key(3))
    assert (
        len({str(members(7, 2, Key(3).fold(round))) for round in range(20)}) > 15
    )  # new buckets in every round
    assert (
        members(3, 1, Key(0)) == [[i] for i in sum(members(3, 1, Key(0)), [])]
        and len(members(4, 9, Key(0))) == 1
    )


def test_means_weights_and_attackers_by_hand() -> None:
    look, key = Look(seen=[]), Key(5)
    x, w = updates(5)
    ctx = replace(context_of(x, torch.tensor([2, 3, 5, 7, 11]), assumed=2), key=key)
    order = key.fold("bucketing").fold(ctx.ids).bits.argsort().tolist()
    buckets = [order[:2], order[2:4], order[4:]]
    found = Bucketing()(look)(x, w, {}, ctx)
    mixed, total, inside = look.seen[0]
    for place, bucket in enumerate(buckets):
        slow = sum(w[i] * x[i] for i in bucket) / sum(w[i] for i in bucket)
        torch.testing.assert_close(mixed[place], slow, rtol=0, atol=1e-12)
        assert abs(total[place] - sum(w[i] for i in bucket)) < 1e-12
    assert inside.assumed == 2 and inside.ids.tolist() == [0, 1, 2] and not found.fallback
    expected = torch.zeros(5, dtype=torch.float64)
    expected[buckets[0]] = w[buckets[0]] / w[buckets[0]].sum()
    torch.testing.assert_close(found.weights, expected)
    torch.testing.assert_close(found.value, mixed[0])


def test_too_few_buckets_are_left_to_the_rule() -> None:
    x = torch.ones(4, 2)
    assert Bucketing()(Look(seen=[]))(x, torch.full((4,), 0.25), {}, context_of(x)).fallback


def test_around_the_mean_it_changes_nothing() -> None:
    x, w = updates(7)
    found = Bucketing(s=3)(Mean())(x, w, {}, context_of(x))
    torch.testing.assert_close(found.value, w @ x, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.weights, w, rtol=0, atol=1e-12)


def test_clients_without_weight_share_equally() -> None:
    share, total = shares(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]), 2)
    assert share.tolist() == [0.5, 0.5, 0.0, 1.0] and total.tolist() == [0.0, 1.0]


def test_the_authors_draw_once_and_count_fewer_attackers() -> None:
    look, x = Look(seen=[]), torch.eye(8)
    for seed in (1, 2):
        Bucketing(variant="authors")(look)(
            x, torch.full((8,), 1 / 8), {}, replace(context_of(x, assumed=3), key=Key(seed))
        )
    assert torch.equal(look.seen[0][0], look.seen[1][0]) and look.seen[0][2].assumed == 1


def test_a_share_of_attackers_too_large_for_any_number_of_buckets() -> None:
    class Majority(Look):
        """Needs more good vectors than bad ones."""

        condition = "n > 2f"

        def least(self, f: int) -> int:
            return 2 * f + 1

    assert Bucketing()(Majority(f=0.2)).least(2) == 9  # five buckets of two
    with pytest.raises(
        ConfigError,
        match=r"aggregator: bucketing\(.*\) needs n > 2f for n buckets of 2 clients, .* with f = 0.3; lower",
    ):
        Bucketing()(Majority(f=0.3))
    assert (
        Bucketing(variant="authors")(Majority(f=0.3)).least(3) == 5
    )  # of three buckets (the last one begun) one is bad


@pytest.mark.parametrize("s", [1, 2, 3])
@pytest.mark.parametrize("variant", ["paper", "authors"])
def test_what_counts_as_enough_is_what_does_not_fall_back(variant: str, s: int) -> None:
    for f in (0, 1, 2, 3):
        rule = Bucketing(s=s, variant=variant)(MultiKrum(f=f))
        least = next(n for n in range(1, 99) if rule.enough(n))
        for n in range(max(1, least - 2), least + 6):
            x, w = updates(n)
            assert rule(x, w, {}, context_of(x, assumed=f)).fallback == (n < least), (f, n)
