"""What attackers remember from round to round.

It is a flat dict of tensors for each experiment. Attackers that know each other share it; attackers that know
only themselves have each a part of their own. It is committed with the round and restored with it, so a run
that is killed goes on with the same bits. It costs its own size, in memory and in every committed round. No
server half, rule or detector can reach it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from holdfast.core.columns import Columns, current
from holdfast.core.types import State

_COLUMNS = "columns/"
"""Before the names of tensors that have the columns of the updates."""


@dataclass
class Memory:
    """The memory of attackers that act together, during one exchange: what they knew before, and what they
    remember from now on."""

    before: Mapping[str, Tensor] = field(default_factory=dict)
    fresh: State = field(default_factory=dict)

    def recall(self, name: str) -> Tensor | None:
        """What was remembered under this name; None where nothing was. Where several processes share the
        updates, a tensor with their columns comes as this process's part."""
        for stored in (name, _COLUMNS + name):
            if stored in self.fresh:
                return self.fresh[stored]
            if stored in self.before:
                columns, value = current(), self.before[stored]
                return value if columns is None or stored == name else columns.mine(value)
        return None

    def remember(self, name: str, value: Tensor, columns: bool = False) -> None:
        """Remember a tensor in place of what had this name. `columns`: its last axis is that of the
        updates."""
        self.fresh[_COLUMNS + name if columns else name] = value.detach()


def whole(fresh: Mapping[str, Tensor], columns: Columns | None) -> State:
    """What is remembered, with all columns of the updates. Every process asks for it at the same point."""
    return {
        name: value if columns is None or not name.startswith(_COLUMNS) else columns.whole(value)
        for name, value in fresh.items()
    }


class Memories:
    """What all attackers of one experiment remember, under the names of their owners."""

    def __init__(self) -> None:
        self.tensors: State = {}
        self._kept: State = {}

    def of(self, owner: str) -> Memory:
        prefix = f"{owner}/"
        mine = {name: value for name, value in self.tensors.items() if name.startswith(prefix)}
        return Memory({name.removeprefix(prefix): value for name, value in mine.items()})

    def add(self, owner: str, fresh: Mapping[str, Tensor]) -> None:
        self.tensors = {**self.tensors, **{f"{owner}/{name}": value for name, value in fresh.items()}}

    def keep(self) -> None:
        """Take a note of everything: an exchange that fails half way is taken back by `restore`."""
        self._kept = self.tensors

    def restore(self) -> None:
        self.tensors = self._kept


def owner_of(knows: str, ids: Tensor) -> str:
    """Whose memory these attackers use: one for all that know each other, else each has its own."""
    return str(int(ids[0])) if knows == "own" else "all"
