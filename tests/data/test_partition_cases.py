"""Small cases computed by hand, for the partitions that have more to them than iid, dirichlet and
pathological."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import build
from holdfast.data.partitions import Assignment
from holdfast.data.partitions.base import apportion

TEN = np.repeat(np.arange(10), 60)


def assign(
    table: dict, labels: np.ndarray = TEN, clients: int = 10, seed: int = 0, users: np.ndarray | None = None
) -> Assignment:
    assignment = build("partition", table)(labels, clients, np.random.default_rng(seed), users)
    return assignment if isinstance(assignment, Assignment) else Assignment(assignment)


def counts(lists: Any, labels: np.ndarray = TEN) -> np.ndarray:
    """[clients, classes]."""
    return np.stack([np.bincount(labels[rows], minlength=labels.max() + 1) for rows in lists])


@pytest.mark.parametrize(
    ("total", "weights", "least", "expected"),
    [
        (10, [1, 1, 1], 0, [4, 3, 3]),
        (100, [10, 26, 26], 1, [16, 42, 42]),
        (4, [100, 1, 1], 1, [2, 1, 1]),  # in proportion 3.9, 0.04, 0.04
        (20, [8, 1, 1, 0], 3, [11, 3, 3, 3]),
        (12, [1, 0, 0], 0, [12, 0, 0]),
        (6, [5, 1, 0], 2, [2, 2, 2]),
    ],
)
def test_apportion_by_hand(total: int, weights: list, least: int, expected: list) -> None:
    assert apportion(total, np.array(weights), least).tolist() == expected


# ---- similarity


def test_similarity_0_sorts_by_label_and_100_is_iid() -> None:
    sorted_line = assign({"name": "similarity", "percent": 0})
    assert [rows.tolist() for rows in sorted_line.lists] == [
        list(range(60 * k, 60 * k + 60)) for k in range(10)
    ]
    alike = counts(assign({"name": "similarity", "percent": 100}).lists)
    assert (alike > 0).all() and (alike.sum(1) == 60).all()


def test_similarity_20_by_hand() -> None:
    table = counts(assign({"name": "similarity"}, clients=5).lists)
    assert (table.sum(1) == 120).all() and table.sum(0).tolist() == [60] * 10
    for client, row in enumerate(
        table
    ):  # 96 of 480 sorted samples, about 48 of each class, so two or three neighbours, and 24 of all
        assert row.max() >= 40 and set(np.argsort(row)[-2:]) <= set(range(2 * client - 1, 2 * client + 3))


def test_similarity_with_samples_per_client_uses_all_classes() -> None:
    table = counts(assign({"name": "similarity", "percent": 25, "samples_per_client": 8}).lists)
    assert (table.sum(1) == 8).all() and (table.sum(0) > 0).all()


# ---- grouped


def test_groups_of_classes_get_clients_by_their_number_of_classes() -> None:
    assignment = assign({"name": "grouped", "groups": ["0-1", "2-9"]})
    group, table = assignment.facts["group"], counts(assignment.lists)
    assert np.bincount(group).tolist() == [2, 8] and table.sum() == 600
    assert table.sum(1).tolist() == [60] * 10  # 120 samples of two classes for two clients, 480 for eight
    for own, row in zip(group, table, strict=True):
        mine = row[:2].sum() if own == 0 else row[2:].sum()
        assert mine >= 48  # 80 % of 60, and what of the rest happens to be of the group's classes


def test_grouped_is_exact_at_share_one_and_group_sizes_decide_client_sizes() -> None:
    labels = np.concatenate([np.repeat([0, 1], 100), np.repeat([2, 3], 10)])
    assignment = assign({"name": "grouped", "groups": 2, "share": 1}, labels, clients=4)
    for own, row in zip(assignment.facts["group"], counts(assignment.lists, labels), strict=True):
        assert (row[:2].sum(), row[2:].sum()) == ((100, 0) if own == 0 else (0, 10))
    sized = assign(
        {"name": "grouped", "groups": 2, "share": 0.75, "samples_per_client": 8}, labels, clients=4
    )
    for own, row in zip(sized.facts["group"], counts(sized.lists, labels), strict=True):
        assert row.sum() == 8 and (row[:2] if own == 0 else row[2:]).sum() >= 6


def test_groups_are_classes_and_ranges_and_emnist_has_a_name() -> None:
    labels = np.repeat(np.arange(62), 20)
    named = assign({"name": "grouped", "groups": "emnist"}, labels, clients=100)
    assert np.bincount(named.facts["group"]).tolist() == [16, 42, 42]
    spelt = assign(
        {"name": "grouped", "groups": ["0-9", ["10-20", 21, "22-35"], "36-61"]}, labels, clients=100
    )
    assert all(map(np.array_equal, named.lists, spelt.lists))
    assert np.bincount(assign({"name": "grouped", "groups": 4}).facts["group"]).tolist() == [3, 3, 2, 2]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("mnist", "there are no groups called 'mnist'"),
        (0, "at least one group"),
        ([], "at least one group"),
        (["0-4", [4, 5]], "class 4 is in two groups"),
        (["4-2"], "'4-2' is neither a class nor a range"),
        (["a-c"], "'a-c' is neither"),
        (["0-99999999"], "'0-99999999' is neither"),
        (["0-99999", 99999], "class 99999 is in two groups"),
        ([[-1]], "'-1' is neither"),
    ],
)
def test_groups_that_cannot_be_read_are_refused_with_the_config(groups: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^data.partition.groups.*{message}"):
        build("partition", {"name": "grouped", "groups": groups}, "data.partition")


# ---- by-user


def test_by_user_gives_each_client_one_users_samples() -> None:
    users = np.array([7, 3, 7, 9, 3, 7])
    assignment = assign({"name": "by-user"}, np.zeros(6, int), 3, users=users)
    assert [rows.tolist() for rows in assignment.lists] == [[1, 4], [0, 2, 5], [3]] and assignment.facts[
        "user"
    ].tolist() == [3, 7, 9]
    capped = assign({"name": "by-user", "samples_per_client": 2}, np.zeros(6, int), 3, users=users)
    assert [len(rows) for rows in capped.lists] == [2, 2, 1] and set(capped.lists[1]) < {0, 2, 5}
    kept = {
        tuple(assign({"name": "by-user", "samples_per_client": 2}, np.zeros(6, int), 3, seed, users).lists[1])
        for seed in range(30)
    }
    assert kept == {(0, 2), (0, 5), (2, 5)}, "a random choice"
    drawn = [assign({"name": "by-user"}, np.zeros(6, int), 2, seed, users) for seed in range(30)]
    assert {tuple(d.facts["user"]) for d in drawn} == {(3, 7), (3, 9), (7, 9)}
    assert all((users[d.lists[i]] == d.facts["user"][i]).all() for d in drawn for i in range(2))


# ---- single-label


def test_single_label_by_hand() -> None:
    labels = np.repeat([2, 5, 6], [7, 4, 9])
    table = counts(assign({"name": "single-label"}, labels, 5).lists, labels)
    assert table[:, [2, 5, 6]].tolist() == [[4, 0, 0], [0, 2, 0], [0, 0, 9], [3, 0, 0], [0, 2, 0]]
    few = counts(assign({"name": "single-label", "samples_per_client": 3}, labels, 2).lists, labels)
    assert few[:, [2, 5, 6]].tolist() == [[3, 0, 0], [0, 3, 0]]


# ---- complementary pairs


def test_pairs_of_fedcoms_ten_clients_by_hand() -> None:
    labels = np.repeat(np.arange(10), 400)  # 100 of each class for testing, 300 to train on: 285 and 15
    assignment = assign({"name": "complementary-pairs"}, labels)
    table, facts = counts(assignment.lists, labels), assignment.facts
    assert assignment.overlap and facts["partner"].tolist() == [1, 0, 3, 2, 5, 4, 7, 6, 9, 8]
    assert facts["majority"].tolist() == list(range(10)) and facts["target"].tolist() == [
        1,
        0,
        3,
        2,
        5,
        4,
        7,
        6,
        9,
        8,
    ]
    for client, row in enumerate(table):
        noise = facts["noise"][client]
        assert noise not in (facts["majority"][client], facts["target"][client])
        assert {int(k): int(row[k]) for k in np.flatnonzero(row)} == {
            client: 285,
            client ^ 1: 15,
            int(noise): 15,
        }
    tested = counts(assignment.tests, labels)
    for client, row in enumerate(tested):
        assert {int(k): int(row[k]) for k in np.flatnonzero(row)} == {client: 100, client ^ 1: 100}
    own = [set(rows[labels[rows] // 2 == client // 2]) for client, rows in enumerate(assignment.lists)]
    assert all(
        not own[i] & own[i ^ 1] and len(own[i] | own[i ^ 1]) == 600 for i in range(10)
    )  # a pair has all of its two classes
    assert (
        len(
            {
                tuple(assign({"name": "complementary-pairs"}, labels, seed=seed).facts["noise"])
                for seed in range(3)
            }
        )
        == 3
    )


def test_more_pairs_than_classes_divide_their_samples() -> None:
    assignment = assign(
        {"name": "complementary-pairs", "ratio": 0.8, "noise": "none", "test": 0.5}, clients=14
    )
    table = counts(assignment.lists)
    assert not assignment.overlap and set(assignment.facts["noise"].tolist()) == {-1}
    assert (
        table[[0, 1, 10, 11], :2].tolist() == [[12, 3], [3, 12]] * 2
    )  # 30 to train on, 15 for each of two pairs
    assert table[[4, 5], 4:6].tolist() == [[24, 6], [6, 24]]  # the only pair on these classes
    assert (
        assignment.tests is not None
        and np.array_equal(assignment.tests[0], assignment.tests[11])
        and table.sum() == 300
    )


@pytest.mark.parametrize(
    ("more", "majority", "minority"),
    [
        ({"ratio": 0.95}, 38, 2),
        ({"ratio": 0.8}, 28, 7),
        ({"ratio": 0.8, "noise": "none"}, 34, 8),
        ({"ratio": 0.5}, 14, 14),
    ],
)
def test_pairs_with_samples_per_client_train_on_exactly_that_many(
    more: dict, majority: int, minority: int
) -> None:
    assignment = assign({"name": "complementary-pairs", "samples_per_client": 42, **more})
    for client, row in enumerate(counts(assignment.lists)):
        assert row.sum() == 42 and (row[client], row[client ^ 1]) == (majority, minority)


def test_pairs_of_classes_of_different_size_are_tested_in_equal_amounts() -> None:
    labels = np.repeat([1, 4, 6], [40, 12, 9])  # the odd class out is there for noise alone
    assignment = assign({"name": "complementary-pairs", "ratio": 0.8}, labels, 2)
    assert counts(assignment.tests, labels)[:, [1, 4, 6]].tolist() == [[3, 3, 0]] * 2
    assert counts(assignment.lists, labels)[:, [1, 4, 6]].tolist() == [[30, 2, 2], [7, 7, 7]]


# ---- quantity


def test_quantity_by_a_power_law_is_exact() -> None:
    sizes = sorted(
        len(rows)
        for rows in assign(
            {"name": "quantity", "form": "power", "exponent": 1, "min_samples": 0}, clients=3
        ).lists
    )
    assert sizes == [109, 164, 327]  # 600 in proportion to 1, 1/2, 1/3: 327.27, 163.64, 109.09
    table = {"name": "quantity", "form": "power", "exponent": 3, "min_samples": 5, "samples_per_client": 12}
    sizes = sorted(len(rows) for rows in assign(table, clients=4).lists)
    assert sizes == [
        5,
        5,
        5,
        33,
    ]  # 48 in all; in proportion to 1, 1/8, 1/27, 1/64 the others would have fewer


def test_quantity_by_dirichlet_is_skewed_and_leaves_the_classes_alone() -> None:
    labels = np.random.default_rng(0).integers(0, 4, 20_000)
    lists = assign({"name": "quantity", "beta": 0.3, "min_samples": 20}, labels, 20).lists
    sizes = np.array([len(rows) for rows in lists])
    assert sizes.sum() == 20_000 and sizes.min() >= 20 and sizes.max() > 4 * 1000
    table = counts(lists, labels)
    big = sizes > 500
    assert np.abs(table[big] / sizes[big, None] - 0.25).max() < 0.08  # five deviations of 500 draws are 0.097


# ---- dirichlet without its cap


def test_dirichlet_without_a_cap_lets_a_client_have_more_classes_than_its_share() -> None:
    labels = np.repeat(np.arange(10), 300)

    def largest_before_the_last_class(cap: bool) -> float:
        lists = [
            assign({"name": "dirichlet", "beta": 0.1, "min_samples": 0, "cap": cap}, labels, 20, seed).lists
            for seed in range(5)
        ]
        return max((labels[rows] < labels[rows].max()).sum() for some in lists for rows in some if len(rows))

    assert largest_before_the_last_class(True) < 150 < largest_before_the_last_class(False)


# ---- Flower's


def test_without_flwr_datasets_the_error_names_it() -> None:
    if importlib.util.find_spec("flwr_datasets") is not None:
        pytest.skip("flwr-datasets is installed")
    with pytest.raises(
        DataError, match="^data.partition: 'flwr' needs the package flwr-datasets; install it"
    ):
        assign({"name": "flwr"})


def test_any_partitioner_of_flwr_datasets_can_be_used() -> None:
    pytest.importorskip("flwr_datasets")
    iid = assign({"name": "flwr"})
    assert sorted(np.concatenate(iid.lists).tolist()) == list(range(600)) and {
        len(rows) for rows in iid.lists
    } == {60}
    skewed = {
        "name": "flwr",
        "partitioner": "DirichletPartitioner",
        "options": {"alpha": 0.3, "min_partition_size": 5},
    }
    one, same, other = assign(skewed), assign(skewed), assign(skewed, seed=1)
    assert all(map(np.array_equal, one.lists, same.lists)) and not all(
        map(np.array_equal, one.lists, other.lists)
    )
    assert (
        min(len(rows) for rows in one.lists) >= 5
        and max(len(rows) for rows in assign({**skewed, "samples_per_client": 20}).lists) == 20
    )
    users = np.arange(600) % 4
    by_user = {"name": "flwr", "partitioner": "NaturalIdPartitioner", "options": {"partition_by": "user"}}
    assert sorted(int(users[rows[0]]) for rows in assign(by_user, clients=4, users=users).lists) == [
        0,
        1,
        2,
        3,
    ]
    with pytest.raises(DataError, match="makes 4 clients, but data.clients is 10; set data.clients to 4"):
        assign(by_user, users=users)
    with pytest.raises(DataError, match="has no 'DirichletPartition'; did you mean 'DirichletPartitioner'"):
        assign({"name": "flwr", "partitioner": "DirichletPartition"})
    with pytest.raises(DataError, match="DirichletPartitioner failed: [^\n]*alpha"):
        assign({"name": "flwr", "partitioner": "DirichletPartitioner"})


# ---- impossible assignments


@pytest.mark.parametrize(
    ("table", "clients", "message"),
    [
        (
            {"name": "similarity", "samples_per_client": 61},
            10,
            "10 clients x 61 samples_per_client is more than the 600 samples; low",
        ),
        ({"name": "grouped", "groups": 11}, 20, "11 groups but the data has 10 classes; use fewer groups"),
        (
            {"name": "grouped", "groups": 4},
            3,
            "4 groups but only 3 clients; use fewer groups or raise data.clients",
        ),
        (
            {"name": "grouped", "groups": ["0-9", "10-12"]},
            5,
            "no class of group 1 occurs in the data; change groups",
        ),
        (
            {"name": "grouped", "groups": ["0", "1-2"], "samples_per_client": 50},
            6,
            "group 0 has 60 samples but its 2 clients need 80",
        ),
        (
            {"name": "by-user"},
            4,
            "this dataset has no users, which by-user needs; choose another partition",
        ),
        (
            {"name": "single-label", "samples_per_client": 31},
            11,
            "class 0 has 60 samples but its 2 clients need 62; lower samples_per_cl",
        ),
        ({"name": "complementary-pairs"}, 5, "5 clients cannot be paired; make data.clients even"),
        (
            {"name": "complementary-pairs", "samples_per_client": 60},
            10,
            "class 0 has 45 samples to train a pair on but needs 57",
        ),
        (
            {"name": "complementary-pairs", "samples_per_client": 2},
            10,
            "samples_per_client 2 with ratio 0.95 and noise class leaves",
        ),
        (
            {"name": "quantity", "min_samples": 61},
            10,
            "10 clients x 61 min_samples is more than the 600 samples to assign; lower min_sample",
        ),
    ],
)
def test_impossible_assignments_are_a_one_line_error(table: dict, clients: int, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        assign(table, clients=clients)
    assert str(error.value).startswith("data.partition: ") and "\n" not in str(error.value)


def test_too_few_classes_or_users_are_refused() -> None:
    with pytest.raises(DataError, match="pairs with noise class need 3 classes but the data has 2"):
        assign({"name": "complementary-pairs"}, np.repeat([0, 1], 50), 2)
    with pytest.raises(
        DataError, match='no third class has 8 samples for noise; set noise = "none" or raise ratio'
    ):
        assign({"name": "complementary-pairs", "ratio": 0.8}, np.repeat([0, 1, 2], [50, 50, 7]), 2)
    with pytest.raises(
        DataError, match="4 clients but the data has 3 users; lower data.clients or leave it out"
    ):
        assign({"name": "by-user"}, np.zeros(6, int), 4, users=np.arange(6) % 3)
