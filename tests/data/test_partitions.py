"""What every partition promises, whatever it deals: checked for all that are registered, on data of all
kinds."""

from __future__ import annotations

import importlib.util
import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from holdfast.core.errors import DataError
from holdfast.core.keys import Key
from holdfast.core.registry import build, describe, parts
from holdfast.data.federation import DataSettings, Samples, build_federation
from holdfast.data.partitions import Assignment
from tests.helpers import samples_of

# Settings to try each partition with, one strategy per setting; a partition that is not here is not tested,
# which is an error below.
SPACE: dict[str, dict[str, Any]] = {
    "iid": {},
    "dirichlet": {
        "beta": st.sampled_from([1e-300, 0.01, 0.5, 100.0]),
        "min_samples": st.integers(0, 4),
        "cap": st.booleans(),
    },
    "pathological": {"classes_per_client": st.integers(1, 3), "form": st.sampled_from(["blocks", "shards"])},
    "similarity": {"percent": st.sampled_from([0, 20, 33.3, 100])},
    "grouped": {
        "share": st.sampled_from([0, 0.5, 0.8, 1]),
        "groups": st.sampled_from([1, 2, 3, ("0-2", ("4-9", 3)), ("7", (0, 1))]),
    },
    "by-user": {},
    "single-label": {},
    "complementary-pairs": {
        "ratio": st.sampled_from([0.5, 0.8, 0.95]),
        "noise": st.sampled_from(["class", "none"]),
        "test": st.sampled_from([0.01, 0.25, 0.5]),
    },
    "quantity": {
        "form": st.sampled_from(["dirichlet", "power"]),
        "beta": st.sampled_from([1e-300, 0.01, 0.5, 100.0]),
        "exponent": st.sampled_from([0, 1, 100]),
        "min_samples": st.integers(0, 4),
    },
    "flwr": {},
}
BOUND = {"dirichlet", "by-user", "flwr"}  # samples_per_client is an upper bound
MEAN = {"quantity"}  # samples_per_client is the mean
MAYBE_EMPTY = {
    "dirichlet",
    "quantity",
    "flwr",
}  # with min_samples 0, clients without samples are what was asked for
NAMES = sorted(set(SPACE) - ({"flwr"} if importlib.util.find_spec("flwr_datasets") is None else set()))


def assign(table: dict, labels: np.ndarray, clients: int, seed: int, users: np.ndarray | None) -> Assignment:
    assignment = build("partition", table)(labels, clients, np.random.default_rng(seed), users)
    return assignment if isinstance(assignment, Assignment) else Assignment(assignment)


def check(table: dict, assignment: Assignment, labels: np.ndarray, clients: int) -> None:
    """Check the invariants of an assignment."""
    name, size, held = table["name"], table.get("samples_per_client"), np.concatenate(assignment.lists)
    sizes = np.array([len(rows) for rows in assignment.lists])
    assert len(assignment.lists) == clients and (
        not len(held) or (held.min() >= 0 and held.max() < len(labels))
    )
    assert all(
        (np.diff(rows) > 0).all() for rows in assignment.lists
    )  # sorted, and none twice with one client
    if not assignment.overlap:
        assert len(np.unique(held)) == len(held)
    if assignment.tests is not None:
        assert len(assignment.tests) == clients and not len(
            np.intersect1d(held, np.concatenate(assignment.tests))
        )
    if name not in MAYBE_EMPTY or table.get("min_samples"):
        assert sizes.min() >= table.get("min_samples", 1)
    if size is not None and name in BOUND:
        assert sizes.max() <= size
    elif size is not None:
        assert sizes.sum() == size * clients and (name in MEAN or (sizes == size).all())
    assert all(len(values) == clients and values.dtype.kind == "i" for values in assignment.facts.values())


def same(one: Assignment, other: Assignment) -> bool:
    alike = all(map(np.array_equal, one.lists, other.lists)) and all(
        map(np.array_equal, one.tests or [], other.tests or [])
    )
    return alike and all(np.array_equal(one.facts[name], other.facts[name]) for name in one.facts)


def test_every_registered_partition_is_checked_here() -> None:
    built_in = {name for name, part in parts("partition").items() if part.__module__.startswith("holdfast.")}
    # as-given divides only what was handed over client by client: tests/data/handed
    assert built_in - {"as-given"} == set(SPACE)


@pytest.mark.parametrize("name", sorted(SPACE))
def test_every_partition_documents_its_counts_and_takes_samples_per_client(name: str) -> None:
    card = describe(parts("partition")[name])
    assert card["summary"] and "Counts: " in card["text"] and all(item["help"] for item in card["settings"])
    assert "samples_per_client" in {item["name"] for item in card["settings"]}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Labels, of which some classes do not occur or only once, users or none, and clients: few of everything,
    to meet all corners."""
    kinds = draw(st.sampled_from([[4], [1, 8], [0, 5, 6], [0, 1, 2, 7], list(range(10))]))
    total = draw(st.sampled_from([1, 5, 40, 150, 400]))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    labels = rng.choice(
        kinds, size=total, p=rng.dirichlet(np.full(len(kinds), draw(st.sampled_from([0.5, 100.0]))))
    )
    users = draw(st.sampled_from([None, rng.integers(3, 13, total), rng.integers(0, 2, total)]))
    return labels, users, draw(st.sampled_from([1, 2, 3, 4, 6, 10, 24]))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"flwr"}))
@settings(max_examples=150, deadline=None)
@given(data=st.data(), world=worlds(), seed=st.integers(0, 5))
def test_the_invariants_hold_or_a_one_line_error_names_the_setting(
    name: str, data: st.DataObject, world: tuple, seed: int
) -> None:
    check_invariants(name, data, world, seed)


@pytest.mark.skipif("flwr" not in NAMES, reason="needs flwr-datasets")
@settings(max_examples=40, deadline=None)  # it has no settings of its own, and each example is slow
@given(data=st.data(), world=worlds(), seed=st.integers(0, 5))
def test_the_invariants_hold_for_a_partitioner_of_flower(
    data: st.DataObject, world: tuple, seed: int
) -> None:
    check_invariants("flwr", data, world, seed)


def check_invariants(name: str, data: st.DataObject, world: tuple, seed: int) -> None:
    labels, users, clients = world
    size = data.draw(st.one_of(st.none(), st.integers(1, 12)), "samples_per_client")
    table = {"name": name, **data.draw(st.fixed_dictionaries(SPACE[name]))} | (
        {} if size is None else {"samples_per_client": size}
    )
    before = labels.copy()
    try:
        assignment = assign(table, labels, clients, seed, users)
    except DataError as error:
        event("refused")
        assert re.fullmatch(
            r"data\.partition: [^\n]*\b(lower|raise|use|set|make|change|choose|need)\b[^\n]*", str(error)
        )
        return
    event("assigned")
    check(table, assignment, labels, clients)
    assert np.array_equal(labels, before) and same(assignment, assign(table, labels, clients, seed, users))


# A world in which everything can be assigned: 1,200 samples of ten classes with a gap, by 40 users.
LABELS = np.random.default_rng(7).permutation(np.repeat([0, 1, 2, 3, 5, 6, 7, 8, 9, 10], 120))
USERS = np.random.default_rng(8).integers(0, 40, 1200)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clients", [4, 20, 40])
@pytest.mark.parametrize("size", [None, 12])
def test_ordinary_data_can_be_assigned(name: str, clients: int, size: int | None) -> None:
    table: dict[str, Any] = {"name": name} | ({} if size is None else {"samples_per_client": size})
    assignment = assign(table, LABELS, clients, 0, USERS)
    check(table, assignment, LABELS, clients)
    if clients == 20:  # with others there may be nothing to draw: one client for each class or user
        assert not same(assignment, assign(table, LABELS, clients, 1, USERS))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"complementary-pairs"}))
def test_one_client_and_one_class(name: str) -> None:
    table = {"name": name} | {"pathological": {"classes_per_client": 1}, "grouped": {"groups": 1}}.get(
        name, {}
    )
    check(table, assignment := assign(table, np.full(30, 4), 1, 0, np.full(30, 2)), np.full(30, 4), 1)
    assert assignment.lists[0].tolist() == list(range(30))


@pytest.mark.parametrize(
    "name", sorted(set(NAMES) - {"flwr"})
)  # how long Flower's partitioners take is theirs
@pytest.mark.parametrize("classes", [10, 200])
@pytest.mark.parametrize("beta", [0.01, None])
def test_a_thousand_clients_are_assigned_or_refused_within_a_second(
    name: str, classes: int, beta: float | None
) -> None:
    skewed = beta is not None and "beta" in SPACE[name]
    rng = np.random.default_rng(0)
    labels, users = rng.integers(0, classes, 60_000), rng.integers(0, 1_200, 60_000)
    begin = time.process_time()  # that others use the machine too is no error
    try:
        assignment = assign({"name": name} | ({"beta": beta} if skewed else {}), labels, 1_000, 0, users)
        assert len(assignment.lists) == 1_000
    except DataError as error:
        assert "raise beta, lower min_samples or lower data.clients" in str(error)
    assert time.process_time() - begin < 1


def by_hand(name: str, **more: Any) -> tuple[DataSettings, Samples]:
    samples = samples_of(torch.zeros(1200, 2), torch.from_numpy(LABELS), 11)
    object.__setattr__(samples, "user", torch.from_numpy(USERS))
    return DataSettings(clients=20, partition=name, **more), samples


@pytest.mark.parametrize("name", NAMES)
def test_no_client_is_tested_on_a_training_sample(name: str) -> None:
    split = {"train": 0.6, "validation": 0.15, "test": 0.25}
    settings, samples = by_hand(name, split=split, held_out=3, root=30)
    fed = build_federation(settings, Key(1), samples)
    assert fed.clients == 20 and len(fed.held_out) == 3 and len(fed.digest) == 64
    train, test, root = set(fed.train.row.tolist()), set(fed.test.row.tolist()), set(fed.root.row.tolist())
    assert (
        not train & test
        and not root & (train | test)
        and int(fed.validation.counts.min()) >= 1
        and int(fed.test.counts.min()) >= 1
    )
    for client in range(20):
        own = (
            fed.train.client(client)[0].tolist()
            + fed.validation.client(client)[0].tolist()
            + fed.test.client(client)[0].tolist()
        )
        assert len(set(own)) == len(own)
    assert (
        fed.digest
        == build_federation(settings, Key(1), samples).digest
        != build_federation(settings, Key(2), samples).digest
    )


def test_facts_are_part_of_the_digest() -> None:
    seen = {}

    class Told(type(build("partition", "iid"))):  # type: ignore[misc]
        told: int = 0

        def __call__(self, *args: Any) -> Assignment:
            return Assignment(super().__call__(*args), facts={"told": np.full(20, self.told)})

    for told in (1, 2):
        settings, samples = by_hand("iid")
        fed = build_federation(settings.model_copy(update={"partition": Told(told=told)}), Key(0), samples)
        seen[told] = fed.digest
        assert fed.facts["told"].tolist() == [told] * 20
    assert seen[1] != seen[2]
