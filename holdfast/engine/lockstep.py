"""Many experiments at once: their round generators run together, and what they ask for at the same point is answered together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.core.types import Exchange, Uplink
from holdfast.engine.cell import Cell
from holdfast.engine.client import EVALUATE
from holdfast.engine.simulator import Call


class Engine(Protocol):
    """Whoever carries out exchanges: the simulator in this process, or a fleet of real clients."""

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]: ...


@dataclass
class Player:
    """One experiment in the middle of its run: its cell, its generator, and what it waits for."""

    cell: Cell
    steps: Generator[Exchange, Uplink, Any]
    waiting: Exchange | None = None
    result: Any = None

    def turn(self, up: Uplink | None) -> None:
        """Go on to the next exchange, or to the end."""
        try:
            self.waiting = next(self.steps) if up is None else self.steps.send(up)
        except StopIteration as end:
            self.waiting, self.result = None, end.value

    def place(self) -> tuple[int, bool, int]:
        """Where in its run it stands; those furthest behind go first, so that cells stay together and can be fused."""
        assert self.waiting is not None
        return self.cell.round, self.waiting.task == EVALUATE, self.waiting.step


def drive(engine: Engine, players: list[Player], after: Callable[[Player], None] = lambda player: None) -> list[Any]:
    """Play all to the end; `after` is called whenever a player has moved on."""
    for player in players:
        player.turn(None)
        after(player)
    while any(player.waiting is not None for player in players):
        behind = min(player.place() for player in players if player.waiting is not None)
        now = [player for player in players if player.waiting is not None and player.place() == behind]
        calls = [Call(player.cell, player.waiting) for player in now if player.waiting is not None]
        for player, up in zip(now, engine.exchange(calls), strict=True):
            player.turn(up)
            after(player)
    return [player.result for player in players]
