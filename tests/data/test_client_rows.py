from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.data.federation import ClientRows


def random_table(seed: int, clients: int) -> tuple[ClientRows, list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 7, 500)
    lists = [rng.choice(500, size=rng.integers(0, 9), replace=False) for _ in range(clients)]
    return ClientRows.from_lists(lists, y), lists, y


@pytest.mark.parametrize("seed", range(5))
def test_take_equals_a_loop_over_clients(seed: int) -> None:
    table, lists, y = random_table(seed, 40)
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 40, 13))  # in any order, some twice
    padded = table.take(ids)
    width = max(len(lists[i]) for i in ids)
    assert padded.rows.shape == padded.labels.shape == padded.mask.shape == (13, width)
    for place, client in enumerate(ids.tolist()):
        rows = lists[client].tolist()
        blank = [0] * (width - len(rows))
        assert padded.count[place] == len(rows)
        assert padded.rows[place].tolist() == rows + blank
        assert padded.labels[place].tolist() == y[rows].tolist() + blank
        assert padded.mask[place].tolist() == [True] * len(rows) + [False] * len(blank)


def test_counts_and_rows_of_single_clients() -> None:
    table, lists, y = random_table(3, 10)
    assert table.clients == 10 and table.counts.tolist() == [len(rows) for rows in lists]
    for client, rows in enumerate(lists):
        row, label = table.client(client)
        assert row.tolist() == rows.tolist() and label.tolist() == y[rows].tolist()


def test_a_wider_table_on_request_and_never_a_narrower_one() -> None:
    table = ClientRows.from_lists([np.array([1, 2]), np.array([3])], np.arange(4))
    assert table.take(torch.tensor([1]), at_least=4).rows.tolist() == [[3, 0, 0, 0]]
    assert table.take(torch.tensor([0]), at_least=1).rows.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    "lists", [[np.zeros(0, dtype=np.int64)] * 3, [np.zeros(0), np.array([5]), np.zeros(0)]]
)
def test_take_works_for_clients_without_rows(lists: list[np.ndarray]) -> None:
    table = ClientRows.from_lists(lists, np.arange(10))
    padded = table.take(torch.tensor([0, 2]))
    assert padded.rows.tolist() == [[0], [0]] and padded.count.tolist() == [0, 0] and not padded.mask.any()
    empty = table.take(torch.zeros(0, dtype=torch.int64))
    assert empty.rows.shape == (0, 1) and empty.count.shape == (0,)


@pytest.mark.parametrize("ids", [[-1], [0, 2]])
def test_ids_outside_the_table_are_refused(ids: list[int]) -> None:
    table = ClientRows.from_lists([np.array([1]), np.array([2])], np.arange(4))
    with pytest.raises(IndexError, match="there are 2 clients"):
        table.take(torch.tensor(ids))
    with pytest.raises(IndexError, match="there are 2 clients"):
        table.client(ids[-1])
