from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.experiment.participation import Participation, read_availability

EVERYONE = torch.arange(20)


def made(**options: object) -> Participation:
    return Participation(EVERYONE, Key(0).fold("roster"), **options)  # type: ignore[arg-type]


def drawn(r: Participation, round: int) -> list[int]:
    return r.cohort(round, r.available(round)).tolist()


@pytest.mark.parametrize(("participation", "size"), [(1.0, 20), (0.5, 10), (0.26, 5), (0.125, 3), (0.001, 1)])
def test_cohort_size(participation: float, size: int) -> None:
    for round in range(5):
        cohort = drawn(made(participation=participation), round)
        assert len(cohort) == size and cohort == sorted(set(cohort))


def test_cohorts_change_and_are_fair() -> None:
    r = made(participation=0.25)
    cohorts = [drawn(r, round) for round in range(400)]
    assert len({tuple(c) for c in cohorts}) > 300
    assert drawn(made(participation=0.25), 7) == cohorts[7]
    share = torch.bincount(torch.tensor(cohorts).flatten(), minlength=20) / 400
    assert (share - 0.25).abs().max() < 0.08


def test_a_clients_draw_does_not_depend_on_other_clients() -> None:
    """Without one client the others keep their order: only the last place changes hands."""
    whole = made(participation=0.25)
    for round in range(20):
        before = drawn(whole, round)
        r = made(participation=0.25)
        r.ban({before[0]: "test"})
        after = drawn(r, round)
        assert set(before[1:]) < set(after) and len(after) == 5


def test_availability_by_probability() -> None:
    r = made(availability=0.3)
    there = [r.available(round).tolist() for round in range(300)]
    assert abs(sum(map(len, there)) / 6000 - 0.3) < 0.03
    assert there[3] == made(availability=0.3).available(3).tolist() and len({tuple(t) for t in there}) > 200


def test_availability_by_intervals() -> None:
    r = made(availability={0: [(1, 3)], 5: [(2, 4), (6, 7)], 7: []})
    for round in range(1, 9):
        there = set(r.available(round).tolist())
        assert (0 in there, 5 in there, 7 in there) == (round in (1, 2), round in (2, 3, 6), False)
        assert len(there - {0, 5, 7}) == 17


def test_fewer_available_than_wanted() -> None:
    r = Participation(torch.arange(4), Key(0), 0.75, {0: [], 1: []})
    assert r.cohort(1, r.available(1)).tolist() == [2, 3]
    nobody = Participation(torch.arange(2), Key(0), 0.5, {0: [], 1: []})
    assert len(nobody.available(1)) == 0 and len(nobody.cohort(1, nobody.available(1))) == 0


def test_bans_are_permanent_and_the_first_reason_stays() -> None:
    r = made()
    r.ban({3: "too long"})
    r.ban({3: "again", 8: "not finite"})
    for round in range(1, 4):
        assert {3, 8}.isdisjoint(r.available(round).tolist()) and len(r.available(round)) == 18
    assert r.banned == {3: "too long", 8: "not finite"}
    fresh = made()
    fresh.restore(r.state())
    assert fresh.banned == r.banned
    empty = made()
    empty.restore(made().state())
    assert empty.banned == {}


def test_a_method_may_draw_banned_clients() -> None:
    r = made(draws_banned=True)
    r.ban({3: "too long"})
    assert drawn(r, 1) == list(range(20)) and r.banned == {3: "too long"}


def test_all_clients_banned() -> None:
    r = made(participation=0.5)
    r.ban({int(c): "all" for c in EVERYONE})
    assert drawn(r, 1) == []


# ---- reading


def test_a_file_of_intervals(tmp_path: Path) -> None:
    file = tmp_path / "there.json"
    file.write_text(json.dumps({"3": [[1, 5], [8, 9]], "0": []}))
    assert read_availability(str(file), 4) == {3: [(1, 5), (8, 9)], 0: []}


def test_probability_and_table() -> None:
    assert read_availability(0.5, 4) == 0.5
    assert read_availability({"1": [(1, 2)]}, 4) == {1: [(1, 2)]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0.0, "probability must be in"),
        (1.5, "probability must be in"),
        ({"9": [(1, 2)]}, "no client 9; there are 4"),
        ({"x": [(1, 2)]}, "client 'x' needs a list"),
        ({"1": [(1, 2, 3)]}, "client '1' needs a list"),
        ("missing.json", "cannot be read"),
    ],
)
def test_mistakes_in_availability_are_one_line(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"train.availability: .*{message}"):
        read_availability(given, 4)  # type: ignore[arg-type]


def test_a_file_must_hold_an_object(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="must hold an object"):
        read_availability(str(tmp_path / "list.json"), 4)


@pytest.mark.parametrize("size", [1, 3, 10, 997])
def test_the_clients_with_the_smallest_hashes_are_drawn(size: int) -> None:
    """Also when two have the same luck: then the first of them."""
    participation = Participation(torch.arange(1000), Key(3), size / 1000)
    available = torch.arange(0, 1000, 2)
    for round in range(5):
        luck = participation.key.fold("cohort", round).fold(available).bits
        expected = sorted(available[torch.argsort(luck, stable=True)[:size]].tolist())
        assert participation.cohort(round, available).tolist() == expected
    twins = torch.tensor([5, 5, 5])
    assert Participation(torch.arange(3), Key(0), 0.34).cohort(1, twins).tolist() == [5]


def test_a_pardon_outlives_what_was_committed_and_a_new_ban_outlives_the_pardon() -> None:
    before = Participation(torch.arange(4), Key(0))
    before.ban({1: "norm", 2: "votes"})
    after = Participation(torch.arange(4), Key(0))
    after.pardon({1})
    after.ban({3: "operator"})
    after.restore(before.state())
    assert after.banned == {2: "votes", 3: "operator"} and after.available(1).tolist() == [0, 1]
    after.ban({1: "again"})
    assert after.available(1).tolist() == [0] and not after.pardoned
