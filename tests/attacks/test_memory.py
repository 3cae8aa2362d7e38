"""What attackers remember by `View`: committed with the exchange, apart where they know only themselves, the
same on ranks and for several experiments at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks import Adversary, Attack, View
from holdfast.attacks.several import Views
from holdfast.core.columns import Columns
from holdfast.core.keys import Key
from holdfast.core.together import in_lockstep
from holdfast.core.types import Exchange, Schema, Uplink
from tests.checks.attack_cases import CLIENTS, World
from tests.thread_ranks import ThreadRanks, on_ranks


class Sum(Attack):
    """Sends the sum of its honest updates of all rounds."""

    reads = "columns"

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        before = view.recall("sum")
        total = view.own("update") if before is None else before + view.own("update")
        view.remember("sum", total, columns=True)
        return {"update": total}

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        before = views.recall("sum")
        total = views.own("update") if before is None else before + views.own("update")
        views.remember("sum", total, columns=True)
        return {"update": total}


def world_of(knows: Any) -> World:
    world = World({"name": "sign-flip"}, d=300)
    attack = Sum(clients=(1, 4), knows=knows)
    world.adversaries = [Adversary(attack, torch.arange(CLIENTS), Key(place)) for place in range(3)]
    return world


def rounds(world: World, play: Any) -> list[Uplink]:
    play(world)
    return play(world)


def test_the_memory_of_one_round_is_there_in_the_next() -> None:
    for knows, owners in (("own", {"1", "4"}), ("colluders", {"all"})):
        world = world_of(knows)
        for up, before in zip(rounds(world, World.one_by_one), world.ups, strict=True):
            torch.testing.assert_close(up["update"][[2, 5]], 2 * before["update"][[2, 5]])
        assert {name.split("/")[0] for name in world.adversaries[0].memories.tensors} == owners


def test_requests_of_an_evaluation_are_not_remembered() -> None:
    world = world_of("own")
    world.sent = replace(world.sent, discard_state=True)
    for up, before in zip(rounds(world, World.one_by_one), world.ups, strict=True):
        assert torch.equal(up["update"], before["update"])
    assert not world.adversaries[0].memories.tensors


def test_several_experiments_remember_as_one_does() -> None:
    """Also where one of them has nothing to remember yet."""
    for knows in ("own", "colluders"):
        together, alone = world_of(knows), world_of(knows)
        for world in (together, alone):
            world.adversaries[1].poison("train", world.schema, world.ups[1], Key(1), 0, world.sent)
        found = in_lockstep(together.generators(), batch=True)
        for one, other in zip(found, alone.one_by_one(), strict=True):
            assert torch.equal(one["update"], other["update"])
        for one, other in zip(together.adversaries, alone.adversaries, strict=True):
            assert one.memories.tensors.keys() == other.memories.tensors.keys()
            assert all(torch.equal(one.memories.tensors[k], v) for k, v in other.memories.tensors.items())


def test_every_rank_remembers_all_columns() -> None:
    def play(ranks: ThreadRanks) -> tuple[list[Tensor], dict[str, Tensor]]:
        world = world_of("colluders")
        columns = Columns(300, ranks)
        world.ups = [
            replace(up.having(update=columns.mine(up["update"]).clone()), columns=columns) for up in world.ups
        ]
        found = rounds(world, World.one_by_one)
        return [up.whole()["update"] for up in found], world.adversaries[0].memories.tensors

    expected = rounds(world := world_of("colluders"), World.one_by_one)
    for updates, memory in on_ranks(2, play):
        assert all(torch.equal(one, up["update"]) for one, up in zip(updates, expected, strict=True))
        assert torch.equal(
            memory["all/columns/sum"], world.adversaries[0].memories.tensors["all/columns/sum"]
        )


def test_what_failed_is_forgotten() -> None:
    world = world_of("own")
    adversary = world.adversaries[0]
    adversary.poison("train", world.schema, world.ups[0], Key(1), 0, world.sent)
    adversary.memories.keep()
    kept = adversary.memories.tensors
    adversary.poison("train", world.schema, world.ups[0], Key(1), 0, world.sent)
    assert adversary.memories.tensors["1/columns/sum"] is not kept["1/columns/sum"]
    adversary.memories.restore()
    assert adversary.memories.tensors is kept and isinstance(world.sent, Exchange)
