from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.core.keys import Key
from holdfast.local.batch_order import Schedule, schedule

COUNTS = np.array([7, 0, 3, 12, 5])


def keys(ids: list[int]) -> Key:
    return Key(0).fold("client").fold(torch.tensor(ids, dtype=torch.int64))


def plan(
    ids: list[int] | None = None,
    counts: np.ndarray = COUNTS,
    batch: int = 5,
    epochs: int | list[int] = 2,
    **options: object,
) -> Schedule:
    ids = list(range(len(counts))) if ids is None else ids
    steps = options.pop("steps", None)
    given = np.broadcast_to(np.asarray(epochs), counts.shape).astype(np.int64)
    return schedule(
        keys(ids),
        counts,
        batch,
        given,
        None if steps is None else np.broadcast_to(np.asarray(steps), counts.shape),
        **options,
    )  # type: ignore[arg-type]


def seen(order: Schedule, row: int) -> list[int]:
    """All positions in the order in which the row sees them."""
    return [int(p) for t in range(order.steps[row]) for p in order.index[t, row] if p >= 0]


def test_every_epoch_is_a_permutation_and_epochs_differ() -> None:
    order = plan(epochs=3)
    for row, count in enumerate(COUNTS):
        epochs = np.array(seen(order, row)).reshape(3, count)
        assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
        if count > 5:
            assert len({tuple(epoch) for epoch in epochs}) == 3


def test_clients_with_different_counts_have_their_own_batches() -> None:
    order = plan()
    assert order.steps.tolist() == [4, 0, 2, 6, 2]
    assert order.index.shape == (6, 5, 5)
    assert order.size[:, 0].tolist() == [5, 2, 5, 2, 0, 0] and order.size[:, 3].tolist() == [5, 5, 2, 5, 5, 2]
    assert ((order.index >= 0).sum(2).numpy() == order.size).all()
    real = order.index >= 0
    assert (real.long().diff(dim=2) <= 0).all()  # real samples first, padding after them


def test_drop_last_skips_incomplete_batches() -> None:
    order = plan(drop_last=True)
    assert order.steps.tolist() == [2, 0, 0, 4, 2]
    assert all(order.size[t, row] == 5 for row in range(5) for t in range(order.steps[row]))
    kept, whole = plan(drop_last=True, epochs=1), plan(epochs=1)
    assert seen(kept, 0) == seen(whole, 0)[:5]  # the same order, only shorter


def test_without_shuffling_samples_come_in_order() -> None:
    assert seen(plan(shuffle=False), 0) == [*range(7), *range(7)]


def test_steps_run_through_as_many_epochs_as_they_need() -> None:
    order = plan(steps=5)
    assert order.steps.tolist() == [5, 0, 5, 5, 5]
    long = plan(epochs=3)
    assert seen(order, 0) == seen(long, 0)[:19]  # batches of 5, 2, 5, 2, 5
    assert seen(plan(steps=1), 3) == seen(long, 3)[:5]


def test_epochs_and_steps_per_row() -> None:
    assert plan(epochs=[1, 1, 2, 0, 3]).steps.tolist() == [2, 0, 2, 0, 3]
    assert plan(steps=[1, 1, 2, 0, 9]).steps.tolist() == [1, 0, 2, 0, 9]


@pytest.mark.parametrize("cohort", [[3], [0, 3], [3, 4], [4, 3, 2, 1, 0]])
def test_the_order_does_not_depend_on_the_cohort(cohort: list[int]) -> None:
    everyone = plan()
    some = plan(cohort, COUNTS[cohort])
    for place, client in enumerate(cohort):
        assert seen(some, place) == seen(everyone, client)


def test_the_order_does_not_depend_on_how_many_samples_others_have() -> None:
    wide = plan(counts=np.array([7, 0, 3, 120, 5]))
    assert all(seen(wide, row) == seen(plan(), row) for row in (0, 2, 4))


def test_another_key_gives_another_order() -> None:
    other = schedule(Key(1).fold("client").fold(torch.arange(5)), COUNTS, 5, np.full(5, 2))
    assert seen(other, 3) != seen(plan(), 3)


def test_positions_are_drawn_evenly() -> None:
    """Each of 6 samples is first in about a sixth of 6000 clients' epochs."""
    order = schedule(Key(0).fold(torch.arange(6000)), np.full(6000, 6), 6, np.ones(6000, dtype=np.int64))
    first = np.bincount(order.index[0, :, 0].numpy(), minlength=6)
    assert abs(first - 1000).max() < 120


@pytest.mark.parametrize("counts", [np.zeros(3, dtype=np.int64), np.zeros(0, dtype=np.int64)])
def test_clients_without_samples_have_no_steps(counts: np.ndarray) -> None:
    assert plan(counts=counts).index.shape[0] == 0
