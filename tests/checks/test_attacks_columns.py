"""Every registered attack, in every variant and with every knowledge, on updates that several ranks share:
the number of ranks changes no bit of what arrives, and it is what arrives without ranks."""

from __future__ import annotations

import warnings
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.aggregators import geometry
from holdfast.attacks import Adversary, Attack, View, distances
from holdfast.core.columns import READS, Columns
from holdfast.core.errors import RunError
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.types import Schema, Uplink
from tests.checks.attack_cases import CLIENTS, NAMED, World, adversary
from tests.helpers import built_in, some_now
from tests.thread_ranks import ThreadRanks, on_ranks

COUNTS = (1, 2, 3)
SHAPES = [(40, torch.float32), (300, torch.float32), (300, torch.float64)]
"""Columns: one piece, so that other ranks have none, and a few pieces."""
LIES: dict[str, Any] = {"lies": {"count": "random"}}


def world_of(settings: dict[str, Any], d: int, dtype: torch.dtype, **more: Any) -> World:
    """Three experiments; in the second the training of some clients diverged, which shows in a column that
    one rank alone has, and in the third clients sent the same."""
    world = World(settings, d, **{**LIES, **more})
    world.stack[1, [2, 5], d - 1] = torch.nan
    world.stack[2, 1:5] = world.stack[2, 1]
    world.ups = [up.having(update=up["update"].to(dtype)) for up in world.ups]
    return world


def arrived(world: World, ranks: ThreadRanks | None, in_place: bool = False) -> list[Uplink]:
    """What arrives of each experiment; the updates are gathered again."""
    found = []
    for up in world.ups:
        if ranks is not None:
            columns = Columns(up["update"].shape[1], ranks)
            up = replace(up.having(update=columns.mine(up["update"]).clone()), columns=columns)
        found.append(up)
    world.ups = found
    return [up.whole() for up in world.one_by_one()]


def assert_equal(found: list[Uplink], expected: list[Uplink], tolerance: float = 0.0) -> None:
    for one, other in zip(found, expected, strict=True):
        for name, value in other.fields.items():
            if not torch.equal(one[name], value):
                torch.testing.assert_close(one[name], value, rtol=tolerance, atol=tolerance, equal_nan=True)


def again(world: World) -> World:
    """The same experiments, with adversaries of their own."""
    fresh = copy(world)
    fresh.adversaries = [adversary(world.attack, place) for place in range(len(world.ups))]
    return fresh


def assert_ranks_change_nothing(settings: dict[str, Any], exact: bool = True, **more: Any) -> None:
    """`exact`: what is found column by column has the bits that it has without ranks."""
    worlds = [world_of(settings, *shape, **more) for shape in SHAPES]
    exact = exact and worlds[0].attack.reads in ("sum", "columns")

    def work(ranks: ThreadRanks | None) -> list[tuple[list[Uplink], list[list[str]]]]:
        mine = [again(world) for world in worlds]
        return [(arrived(world, ranks), world.notes()) for world in mine]

    first = on_ranks(1, work)[0]
    for count in COUNTS[1:]:
        for found in on_ranks(count, work):
            for (ups, notes), (expected, noted) in zip(found, first, strict=True):
                assert_equal(ups, expected)
                assert notes == noted
    for (_, dtype), (ups, notes), (expected, noted) in zip(SHAPES, first, work(None), strict=True):
        assert notes == noted
        assert_equal(ups, expected, 0.0 if exact else 1e-10 if dtype == torch.float64 else 1e-3)


@pytest.mark.parametrize("settings", some_now(NAMED))
def test_ranks_change_nothing(settings: dict[str, Any]) -> None:
    attack = build("attack", settings)
    assert attack.reads in READS and attack.reads != "rows"
    assert_ranks_change_nothing(settings)


@pytest.mark.parametrize("name", ["lie", "min-max"])
def test_blocks_that_end_anywhere_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "BLOCK", 1000)
    monkeypatch.setattr(distances, "_BLOCK", 1000)
    assert_ranks_change_nothing({"name": name}, exact=False)


@pytest.mark.parametrize(
    "more",
    [
        {"lies": {"update": "random"}},
        {"lies": {"update": "invert"}},
        {"lies": {"update": 3.0}},
        {"lies": {}, "claims": {"update": 0.25}},
    ],
    ids=["random", "invert", "factor", "claim"],
)
def test_lies_about_updates(more: dict[str, Any]) -> None:
    assert_ranks_change_nothing({"name": "label-flip"}, **more)
    assert_ranks_change_nothing({"name": "lie"}, **more)


@pytest.mark.parametrize("name", some_now(built_in("attack")))
def test_all_clients_attack(name: str) -> None:
    assert_ranks_change_nothing({"name": name, "fraction": 1.0})


class ByPlace(Attack):
    """Sends what stands at other places of the whole update; it does not say how it reads them."""

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> dict[str, Tensor]:
        assert view.own("update").shape[1:] == schema["update"].shape
        return {"update": view.own("update").flip(1)}


class Constant(ByPlace):
    """Sends one number."""

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> dict[str, Tensor]:
        return {"update": torch.tensor(7.0)}


@pytest.mark.parametrize("kind", [ByPlace, Constant])
def test_an_attack_that_says_nothing_is_shown_whole_updates(kind: type[Attack]) -> None:
    def attacked(ranks: ThreadRanks | None) -> list[Uplink]:
        world = World({"name": "sign-flip"}, 300)
        world.adversaries = [
            Adversary(kind(clients=(0, 2)), torch.arange(CLIENTS), Key(place)) for place in range(3)
        ]
        return arrived(world, ranks)

    expected = attacked(None)
    said = "reads whole updates, so every process gathers those of all: 2 kB for each client"
    with pytest.warns(RuntimeWarning, match=said):
        found = on_ranks(2, attacked)
    for ups in found:
        assert_equal(ups, expected)


def test_an_attack_on_columns_gathers_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(2, lambda ranks: arrived(World({"name": "sign-flip"}, 300), ranks))


def test_an_attack_that_writes_to_shared_replies_is_found() -> None:
    class Vandal(ByPlace):
        """Spoils what is sent."""

        reads = "columns"
        knows: Any = "everyone"

        def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> dict[str, Tensor]:
            view.everyone("update")[0] = 9.0
            return {}

    def spoilt(ranks: ThreadRanks) -> None:
        world = World({"name": "sign-flip"}, 300, root=False)
        world.adversaries = [Adversary(Vandal(clients=(2,)), torch.arange(CLIENTS), Key(0))] * 3
        arrived(world, ranks)

    with pytest.raises(RunError, match="changed replies in place"):
        on_ranks(2, spoilt)
