from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import build, describe, parts

LABELS = np.random.default_rng(7).integers(0, 10, 3000)
FEW = {"name": "pathological"}
TABLES: list[dict[str, Any]] = [
    {"name": "iid"},
    {"name": "iid", "samples_per_client": 37},
    {"name": "dirichlet", "beta": 0.5},
    {"name": "dirichlet", "beta": 0.3, "min_samples": 5, "samples_per_client": 60},
    {"name": "dirichlet", "beta": 1e-3, "min_samples": 0},
    {"name": "pathological"},
    {"name": "pathological", "classes_per_client": 3, "samples_per_client": 50},
    {"name": "pathological", "form": "shards"},
    {"name": "pathological", "form": "shards", "classes_per_client": 3, "samples_per_client": 50},
]


def deal(table: dict, labels: np.ndarray = LABELS, clients: int = 20, seed: int = 0) -> list[np.ndarray]:
    return build("partition", table)(labels, clients, np.random.default_rng(seed), None)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("seed", range(3))
def test_no_sample_in_two_clients_and_the_same_again_from_the_same_seed(table: dict, seed: int) -> None:
    lists = deal(table, seed=seed)
    held = np.concatenate(lists)
    assert len(lists) == 20
    assert len(np.unique(held)) == len(held) and held.min() >= 0 and held.max() < len(LABELS)
    assert all(np.array_equal(a, b) for a, b in zip(lists, deal(table, seed=seed), strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(lists, deal(table, seed=seed + 100), strict=True))
    if "samples_per_client" not in table:
        assert len(held) == len(LABELS)
    elif table["name"] == "dirichlet":
        assert all(table["min_samples"] <= len(rows) <= 60 for rows in lists)
    else:
        assert {len(rows) for rows in lists} == {table["samples_per_client"]}


@pytest.mark.parametrize("name", ["iid", "dirichlet", "pathological"])
def test_every_partition_is_documented_and_takes_samples_per_client(name: str) -> None:
    card = describe(parts("partition")[name])
    assert card["summary"] and all(item["help"] for item in card["settings"])
    assert "samples_per_client" in {item["name"] for item in card["settings"]}


def test_iid_sizes_differ_by_at_most_one() -> None:
    sizes = [len(rows) for rows in deal({"name": "iid"}, clients=7)]
    assert sum(sizes) == 3000 and max(sizes) - min(sizes) == 1


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_smallest_client_and_skew(seed: int) -> None:
    skewed = deal({"name": "dirichlet", "beta": 0.1, "min_samples": 12}, seed=seed)
    mild = deal({"name": "dirichlet", "beta": 100.0, "min_samples": 12}, seed=seed)
    assert min(len(rows) for rows in skewed) >= 12

    def top(lists: list[np.ndarray]) -> float:
        return float(np.mean([np.bincount(LABELS[rows]).max() / len(rows) for rows in lists]))

    assert top(skewed) > 0.45 > 0.25 > top(mild)


def test_dirichlet_clients_with_their_fair_share_get_no_later_class() -> None:
    labels = np.repeat(np.arange(10), 300)
    for rows in deal({"name": "dirichlet", "beta": 0.1, "min_samples": 1}, labels):
        before_last = rows[labels[rows] < labels[rows].max()]
        assert len(before_last) < len(labels) / 20


def test_dirichlet_keeps_a_random_choice_and_so_the_mixture_of_classes() -> None:
    """One client of 10 classes, 300 samples each, keeps 100: about 10 of each class, and not those of the
    first class."""
    labels = np.repeat(np.arange(10), 300)
    (rows,) = deal({"name": "dirichlet", "beta": 0.5, "samples_per_client": 100}, labels, clients=1)
    counts = np.bincount(labels[rows], minlength=10)
    assert len(rows) == 100 and counts.min() >= 3 and counts.max() <= 20


def test_dirichlet_with_a_beta_that_underflows_assigns_all_samples() -> None:
    assert sum(len(rows) for rows in deal({"name": "dirichlet", "beta": 1e-300, "min_samples": 0})) == 3000


def test_blocks_of_twenty_clients_are_five_groups_of_four_with_the_same_pair() -> None:
    lists = deal({"name": "pathological", "classes_per_client": 2})
    for client, rows in enumerate(lists):
        block = client // 4
        assert set(LABELS[rows]) == {2 * block, 2 * block + 1}
    for label in range(10):
        shares = [np.sum(LABELS[rows] == label) for rows in lists if label in LABELS[rows]]
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("clients", [1, 3, 5, 7, 20, 23])
@pytest.mark.parametrize("each", [1, 2, 4, 7, 10])
def test_blocks_give_every_client_its_number_of_classes(clients: int, each: int) -> None:
    for rows in deal({"name": "pathological", "classes_per_client": each}, clients=clients):
        assert len(set(LABELS[rows])) == each


def test_blocks_are_rounded_up_by_hand() -> None:
    """7 clients of 2 of 4 classes: a class is for the first ceil(7 / 4 * 2) = 4 clients that still want one,
    so the last block is the smaller one."""
    labels = np.repeat(np.arange(4), 30)
    lists = deal({"name": "pathological", "classes_per_client": 2}, labels, clients=7)
    assert [sorted(set(labels[rows])) for rows in lists] == [[0, 1]] * 4 + [[2, 3]] * 3
    assert [len(rows) for rows in lists] == [16, 16, 14, 14, 20, 20, 20]


def test_blocks_spread_an_odd_size_evenly_over_the_classes() -> None:
    for rows in deal({"name": "pathological", "classes_per_client": 3, "samples_per_client": 50}):
        counts = np.bincount(LABELS[rows])
        assert sorted(counts[counts > 0]) == [16, 17, 17]


def test_labels_with_gaps_are_assigned() -> None:
    labels = np.repeat([3, 8, 40], 30)
    lists = deal({"name": "pathological", "classes_per_client": 1}, labels, clients=3)
    assert [set(labels[rows]) for rows in lists] == [{3}, {8}, {40}]


def test_shards_are_runs_of_the_sorted_labels() -> None:
    labels = np.repeat(np.arange(10), 60)  # 40 shards of 15: none reaches over two classes
    lists = deal({"name": "pathological", "form": "shards"}, labels)
    assert all(len(rows) == 30 and 1 <= len(set(labels[rows])) <= 2 for rows in lists)
    pairs = {tuple(sorted(set(labels[rows]))) for rows in lists}
    assert len(pairs) > 5  # no blocks


def test_positions_are_sorted() -> None:
    assert all(a < b for table in TABLES for rows in deal(table) for a, b in pairwise(rows.tolist()))


@pytest.mark.parametrize(
    ("table", "clients", "message"),
    [
        ({"name": "iid"}, 3001, "3001 clients but only 3000 samples; lower data.clients"),
        (
            {"name": "iid", "samples_per_client": 151},
            20,
            "20 clients x 151 samples_per_client is more than the 3000 samples; lower sam",
        ),
        (
            {"name": "dirichlet", "min_samples": 151},
            20,
            "20 clients x 151 min_samples is more than the 3000 samples; lower min_",
        ),
        (
            {"name": "dirichlet", "samples_per_client": 9},
            20,
            "samples_per_client 9 is below min_samples 10; raise samples_per_client",
        ),
        (
            {"name": "dirichlet", "beta": 0.01, "min_samples": 140, "tries": 5},
            20,
            "5 draws with beta 0.01 left .* raise beta, lower min_",
        ),
        (
            {**FEW, "classes_per_client": 11},
            20,
            "20 clients x 11 classes_per_client but the data has 10 classes; lower classes_per_client",
        ),
        (
            {**FEW, "samples_per_client": 1},
            20,
            "1 samples_per_client cannot hold 2 classes_per_client; raise samples_per_client",
        ),
        (
            {**FEW, "samples_per_client": 150},
            20,
            "class 0 has 290 samples but its 4 clients need 300; lower samples_per_client",
        ),
        (
            {**FEW, "classes_per_client": 10},
            400,
            "class 0 has [0-9]+ samples but its 400 clients need 400; lower data.clients",
        ),
        (
            {**FEW, "form": "shards"},
            1501,
            "1501 clients x 2 shards but only 3000 samples; lower classes_per_client",
        ),
    ],
)
def test_impossible_assignments_are_a_one_line_error(table: dict, clients: int, message: str) -> None:
    labels = np.sort(LABELS) if clients != 20 else np.where(np.arange(3000) < 290, 0, 1 + np.arange(3000) % 9)
    with pytest.raises(DataError, match=message) as error:
        deal(table, labels, clients)
    assert str(error.value).startswith("data.partition: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "pathologic"}, "unknown partition 'pathologic'; did you mean 'pathological'?"),
        ({"name": "dirichlet", "bta": 1}, "unknown key 'data.partition.bta'; did you mean 'beta'?"),
        ({"name": "dirichlet", "beta": 0}, "data.partition.beta: "),
        ({"name": "pathological", "form": "block"}, "data.partition.form: "),
        ({"name": "iid", "samples_per_client": 0}, "data.partition.samples_per_client: "),
    ],
)
def test_settings_that_are_wrong_name_their_path(table: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build("partition", table, "data.partition")
    assert message in str(error.value)


@pytest.mark.parametrize(
    "table", [{"name": "iid"}, {"name": "dirichlet", "min_samples": 0}, FEW, {**FEW, "form": "shards"}]
)
def test_ten_thousand_clients_are_assigned_quickly(table: dict) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 60_000)
    begin = time.perf_counter()
    assert len(deal(table, labels, clients=10_000)) == 10_000
    assert time.perf_counter() - begin < 10  # about 0.03 s; wide, because a busy machine is no error
