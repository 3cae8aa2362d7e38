from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.keys import Key
from holdfast.core.registry import explain
from holdfast.data.federation import (
    ClientRows,
    DataSettings,
    Federation,
    Samples,
    Split,
    build_federation,
    load_samples,
)
from holdfast.data.partitions import Assignment, Partition
from holdfast.data.partitions.iid import Iid
from holdfast.data.split import split_clients


def federation(seed: int = 0, **settings: object) -> Federation:
    return build_federation(DataSettings(**settings), Key(seed))  # type: ignore[arg-type]


def rows(table: ClientRows) -> list[int]:
    return table.row.tolist()


def test_defaults_work_on_the_embedded_digits() -> None:
    fed = federation()
    assert fed.clients == 20 and fed.samples.name == "digits" and fed.held_out == ()
    assert (
        int(fed.train.counts.sum() + fed.test.counts.sum()) == 1797 and int(fed.validation.counts.sum()) == 0
    )
    assert rows(fed.global_test) == list(range(1437, 1797)) and fed.root.counts.tolist() == [0]
    for table in (fed.train, fed.test, fed.global_test):
        assert torch.equal(table.label, fed.samples.y[table.row])
    for client in range(20):
        assert set(fed.train.client(client)[1].tolist()) == {client // 4 * 2, client // 4 * 2 + 1}


@pytest.mark.parametrize(
    "partition", ["iid", "dirichlet", "pathological", {"name": "iid", "samples_per_client": 40}]
)
@pytest.mark.parametrize("pool", ["train", "train+test"])
def test_no_sample_is_held_twice(partition: object, pool: str) -> None:
    fed = federation(
        partition=partition, pool=pool, root=50, split={"train": 0.6, "validation": 0.2, "test": 0.2}
    )
    held = rows(fed.train) + rows(fed.validation) + rows(fed.test) + rows(fed.root)
    assert len(set(held)) == len(held)
    assert max(held) < (1437 if pool == "train" else 1797)
    if pool == "train":
        assert not set(held) & set(rows(fed.global_test))


def test_same_settings_and_key_same_tables_and_another_key_others() -> None:
    one, same, other = (
        federation(3, root=20, held_out=4),
        federation(3, root=20, held_out=4),
        federation(4, root=20, held_out=4),
    )
    assert one.digest == same.digest != other.digest and len(one.digest) == 64
    assert one.held_out == same.held_out
    for name in ("train", "validation", "test", "root", "global_test"):
        assert torch.equal(getattr(one, name).row, getattr(same, name).row)
    assert federation(3, root=20, held_out=3).digest != one.digest


def test_root_is_balanced_and_comes_from_the_train_split() -> None:
    fed = federation(root=53, partition="iid")
    counts = torch.bincount(fed.root.label)
    assert fed.root.clients == 1 and counts.sum() == 53 and sorted(counts.tolist()) == [5] * 7 + [6] * 3
    assert max(rows(fed.root)) < 1437


def test_root_takes_more_of_the_others_when_a_class_runs_out() -> None:
    samples = Samples(torch.zeros(20, 2), torch.tensor([0] * 3 + [1] * 17), 2, 20)
    fed = build_federation(DataSettings(clients=2, partition="iid", root=10), Key(0), samples)
    assert torch.bincount(fed.root.label).tolist() == [3, 7]


def test_held_out_clients_are_drawn_by_key_and_keep_their_data() -> None:
    fed = federation(held_out=5)
    assert len(set(fed.held_out)) == 5 and list(fed.held_out) == sorted(fed.held_out)
    assert all(fed.train.counts[client] > 0 for client in fed.held_out)
    assert len({federation(seed, held_out=5).held_out for seed in range(4)}) > 1


def test_samples_can_be_shared_and_moved() -> None:
    settings = DataSettings(clients=5)
    samples = load_samples(settings)
    fed = build_federation(settings, Key(0), samples)
    assert fed.samples is samples and fed.digest == build_federation(settings, Key(0)).digest
    assert fed.to("cpu").digest == fed.digest and fed.to("cpu").clients == 5


@pytest.mark.parametrize(
    "shares",
    [
        (0.75, 0.0, 0.25),
        (0.6, 0.2, 0.2),
        (1.0, 0.0, 0.0),
        (0.9, 0.1, 0.0),
        (0.01, 0.0, 0.99),
        (0.01, 0.98, 0.01),
        (0.1, 0.45, 0.45),
    ],
)
def test_split_sizes_by_hand(shares: tuple[float, float, float]) -> None:
    split = Split(train=shares[0], validation=shares[1], test=shares[2])
    count = np.arange(0, 400)
    train, validation, test = split.sizes(count)
    assert (train + validation + test == count).all() and min(train.min(), validation.min(), test.min()) == 0
    assert (train[1:] >= 1).all()
    assert (test[2:] >= 1).all() if shares[2] else not test.any()
    assert (validation[3:] >= 1).all() if shares[1] else not validation.any()
    for size, share in zip((train, validation, test), shares, strict=True):
        assert (np.abs(size - share * count)[20:] <= 3).all()


def test_split_sizes_are_those_of_pfllib_for_round_numbers() -> None:
    assert Split().sizes(np.array([300, 400, 89])).tolist() == [[225, 300, 66], [0, 0, 0], [75, 100, 23]]
    assert (
        Split(train=0.29, validation=0.0, test=0.71).sizes(np.array([100]))[0] == 29
    )  # 0.29 * 100 is 28.999... in floating point


def test_a_clients_split_does_not_depend_on_the_others() -> None:
    y = np.arange(1000) % 10
    mine, others, more = np.arange(0, 40), np.arange(100, 200), np.arange(300, 1000)
    first = split_clients([others, mine, more], y, Split(), Key(1))
    second = split_clients([more, mine], y, Split(), Key(1))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.client(1)[0], b.client(1)[0])
    twice = split_clients([mine, mine], y, Split(), Key(1))[0]
    assert not torch.equal(
        twice.client(0)[0], twice.client(1)[0]
    )  # keyed by the client's id, not by its rows alone
    assert not torch.equal(
        split_clients([others, mine], y, Split(), Key(2))[0].client(1)[0], first[0].client(1)[0]
    )


def test_the_split_is_fair() -> None:
    tests = [split_clients([np.arange(20)], np.zeros(20), Split(), Key(seed))[2].row for seed in range(400)]
    chosen = torch.bincount(torch.cat(tests), minlength=20)
    assert (chosen - 100).abs().max() < 45  # 400 draws of 5 in 20: deviation 8.7


def test_clients_without_samples_are_allowed() -> None:
    fed = federation(clients=300, partition={"name": "dirichlet", "beta": 0.05, "min_samples": 0})
    assert (
        int((fed.train.counts + fed.test.counts).min()) == 0
        and fed.train.counts.sum() + fed.test.counts.sum() == 1797
    )
    assert fed.train.take(torch.arange(300)).rows.shape[0] == 300


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"split": {"train": 0.8}},
            "data.split: train + validation + test must be 1, but they add up to 1.05",
        ),
        ({"split": {"train": 0, "test": 1}}, "data.split.train: "),
        ({"split": {"train": float("nan"), "test": 0.2}}, "data.split.train: "),
        ({"split": {"training": 1}}, "unknown key 'data.split.training'; did you mean 'train'?"),
        ({"client": 3}, "unknown key 'data.client'; did you mean 'clients'?"),
        ({"clients": 0}, "data.clients: "),
        ({"pool": "test"}, "data.pool: "),
        ({"root": -1}, "data.root: "),
        (
            {"held_out": 20},
            "data: held_out is 20 of 20 clients, so no client is left to train; lower held_out",
        ),
        ({"partition": "dirchlet"}, "unknown partition 'dirchlet'; did you mean 'dirichlet'?"),
        ({"partition": {"name": "iid", "beta": 1}}, "unknown key 'data.partition.beta'"),
        ({"partition": {"beta": 1}}, "data.partition: needs a name"),
        ({"samples_per_client": 10}, "unknown key 'data.samples_per_client'"),
        ({"name": "digit"}, "unknown source 'digit'; did you mean 'digits'?"),
        ({"options": {"seed": 1}}, "unknown key 'data.options.seed'"),
        (
            {"options": {"name": "mnist"}},
            "data.options.name: set the name of the dataset in data.name instead",
        ),
    ],
)
def test_wrong_settings_are_a_one_line_error_with_the_path(settings: dict, message: str) -> None:
    with pytest.raises((ValidationError, ConfigError)) as error:
        DataSettings(**settings)
    text = (
        explain(error.value, DataSettings, "data")
        if isinstance(error.value, ValidationError)
        else str(error.value)
    )
    assert message in text and "\n" not in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"partition": {"name": "pathological", "classes_per_client": 11}},
            "20 clients x 11 classes_per_client but the data has 10",
        ),
        ({"clients": 1798, "partition": "iid"}, "1798 clients but only 1797 samples; lower data.clients"),
        ({"root": 1438}, "data.root: 1438 samples requested but the train split has 1437; lower data.root"),
        (
            {"root": 1437, "pool": "train"},
            "data.root: the server holds all samples and leaves none for the clients; lower data.root",
        ),
    ],
)
def test_samples_that_cannot_be_assigned_name_the_setting(settings: dict, message: str) -> None:
    with pytest.raises(DataError) as error:
        federation(**settings)
    assert message in str(error.value) and "\n" not in str(error.value)


class Wrong(Partition):
    name: ClassVar[str] = "wrong"
    how: str = "twice"

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> Any:
        one, two = np.array([1, 2]), np.array([2, 3])
        answer = {
            "twice": [one, two],
            "few": [one],
            "outside": [np.array([-1]), np.array([0])],
            "again": Assignment([one[[0, 0]], two], overlap=True),
            "tested": Assignment([one, two + 5], [np.array([50]), one]),
            "fact": Assignment([one, two + 5], facts={"group": np.array([1])}),
        }
        return answer[self.how]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("twice", "the same sample for two clients"),
        ("few", "lists for 1 clients"),
        ("outside", "positions -1..0"),
        ("again", "the same sample twice for one client"),
        ("tested", "a test sample that a client trains on"),
        ("fact", "a fact 'group' that does not have one number per client"),
    ],
)
def test_a_wrong_assignment_by_a_plug_in_is_refused(how: str, message: str) -> None:
    with pytest.raises(DataError, match=f"'wrong' returned.*{message}"):
        federation(clients=2, partition=Wrong(how=how))


def test_partition_by_object_is_the_same_and_is_written_as_a_table() -> None:
    by_object = DataSettings(partition=Iid(samples_per_client=10))
    by_table = DataSettings(partition={"name": "iid", "samples_per_client": 10})
    assert build_federation(by_object, Key(0)).digest == build_federation(by_table, Key(0)).digest
    assert (
        by_object.model_dump() == by_table.model_dump() == DataSettings(**by_object.model_dump()).model_dump()
    )


def windows(users: int, rows: int = 60) -> Samples:
    return Samples(torch.zeros(rows, 2), torch.arange(rows) % 2, 2, rows, user=torch.arange(rows) % users)


def test_the_default_is_twenty_clients_or_one_per_user() -> None:
    assert (
        DataSettings().known_clients == 20 and DataSettings(clients=7, partition="by-user").known_clients == 7
    )
    settings = DataSettings(partition="by-user", held_out=2)
    assert settings.known_clients is None
    fed = build_federation(settings, Key(0), windows(6))
    assert fed.clients == 6 and fed.facts["user"].tolist() == list(range(6)) and len(fed.held_out) == 2
    assert (fed.train.counts + fed.test.counts).tolist() == [10] * 6
    with pytest.raises(
        DataError, match="^data: held_out is 2 of 2 clients, so no client is left to train; lower held_out"
    ):
        build_federation(settings, Key(0), windows(2))
    with pytest.raises(DataError, match="this dataset has no users, which by-user needs"):
        federation(partition="by-user")


def test_a_partition_with_test_sets_of_its_own_leaves_validation_to_the_split() -> None:
    split = {"train": 0.7, "validation": 0.1, "test": 0.2}
    fed = federation(clients=10, partition={"name": "complementary-pairs", "ratio": 0.8}, split=split)
    for client in range(10):
        labels, tested = fed.train.client(client)[1], fed.test.client(client)[1]
        held = len(labels) + int(fed.validation.counts[client])
        assert int(fed.validation.counts[client]) == held // 10
        assert (
            sorted(torch.bincount(tested)[[client, client ^ 1]].tolist()) == [len(tested) // 2] * 2
            and len(tested) >= 80
        )
    assert fed.facts["partner"].tolist() == [1, 0, 3, 2, 5, 4, 7, 6, 9, 8] and set(fed.facts) == {
        "partner",
        "majority",
        "target",
        "noise",
    }
    assert fed.facts["target"].tolist() == fed.facts["partner"].tolist()
    assert not np.intersect1d(
        fed.train.row, fed.validation.row
    ).size  # the noise classes are other clients' samples too


def test_users_reach_the_partition() -> None:
    seen = []

    class ByUser(Partition):
        def __call__(
            self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
        ) -> list[np.ndarray]:
            assert users is not None
            seen.append(users)
            return [np.flatnonzero(users == user) for user in range(clients)]

    samples = Samples(torch.zeros(12, 2), torch.arange(12) % 2, 2, 8, user=torch.arange(12) % 3)
    fed = build_federation(DataSettings(clients=3, partition=ByUser(), pool="train"), Key(0), samples)
    assert seen[0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1] and (fed.train.counts + fed.test.counts).tolist() == [
        3,
        3,
        2,
    ]
