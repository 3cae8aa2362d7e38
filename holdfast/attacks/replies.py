"""Computations of attacks: what attackers send instead of their honest rows, and putting it into the
replies."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.attacks.base import Attack
from holdfast.attacks.several import Said, Situation, said_together
from holdfast.core.columns import Columns, reads_of, sharing, warn_of_rows
from holdfast.core.device import to_device
from holdfast.core.errors import RunError
from holdfast.core.one_memory import one_memory
from holdfast.core.together import Computation
from holdfast.core.types import UPDATE, Uplink


@dataclass(frozen=True)
class NewRows(Computation):
    """What the attackers of one experiment send instead: one answer for each situation."""

    attack: Attack
    replies: Uplink
    situations: Sequence[Situation]

    def alike(self) -> Hashable | None:
        attack = self.attack
        batched = attack.has_batched_form() and self.replies.columns is None
        return (type(attack), repr(attack.settings())) if batched else None

    def on_device(self) -> bool:
        return any(value.device.type != "cpu" for value in self.replies.fields.values())

    def alone(self) -> list[Said]:
        if self.replies.columns is not None:
            return self._shared(self.replies.columns)
        if self.on_device() and self.attack.has_batched_form() and len(self.situations) > 1:
            with suppress(Exception):  # one by one, so that the attack itself says what it cannot do
                return self.together([])[0]
        written = self._versions()
        said = [situation.alone() for situation in self.situations]
        self._check(written)
        return said

    def _shared(self, columns: Columns) -> list[Said]:
        """Each process finds its columns of the new rows. An attack that reads whole rows is shown those."""
        attack, replies = self.attack, self.replies
        of_updates = [situation for situation in self.situations if situation.up.columns is not None]
        others = any(set(attack.targets(situation.schema)) != {UPDATE} for situation in of_updates)
        gathers = others or reads_of(attack) == "rows"
        if gathers and of_updates:
            warn_of_rows(f"attack '{attack.name}'", columns, replies[UPDATE].element_size())
            replies = replies.whole()
        found, shown = [], replace(self, replies=replies)
        written = shown._versions()
        for situation in self.situations:
            if situation.up.columns is None:
                found.append(situation.alone())  # class means, which every process has
            elif gathers:
                trained = None if situation.trained is None else situation.trained.whole()
                found.append(_cut(replace(situation, up=replies, trained=trained).alone(), columns))
            else:
                with sharing(columns):
                    found.append(situation.alone())
        shown._check(written)
        return found

    def together(self, others: Sequence[NewRows]) -> list[list[Said]]:
        computations = [self, *others]
        written = [computation._versions() for computation in computations]
        said = iter(said_together([s for computation in computations for s in computation.situations]))
        for computation, before in zip(computations, written, strict=True):
            computation._check(before)
        return [[next(said) for _ in computation.situations] for computation in computations]

    def _versions(self) -> list[int]:
        """PyTorch counts the writes to a tensor."""
        return [value._version for value in self.replies.fields.values()]

    def _check(self, before: list[int]) -> None:
        if self._versions() != before:
            raise RunError(
                f"attack '{self.attack.name}' changed replies in place; it must return what its clients"
                f" send instead"
            )


def _cut(said: Said, columns: Columns) -> Said:
    """This process's columns of the updates that attackers send."""
    update = said.rows.get(UPDATE)
    if update is None or not update.ndim or update.shape[-1] != columns.total:  # a single number for all
        return said
    return replace(said, rows={**said.rows, UPDATE: columns.mine(update)})


@dataclass(frozen=True)
class Written(Computation):
    """One field of the replies with new rows in it."""

    field: Tensor
    changes: Sequence[tuple[Tensor, Tensor]]
    """Positions, and what stands there now: a row for each, or one for all."""
    in_place: bool = False
    """Whether the field itself may be written to; else it is copied."""

    def alike(self) -> Hashable | None:
        field = self.field
        return tuple(field.shape), field.dtype, field.device, self.in_place

    def on_device(self) -> bool:
        return self.field.device.type != "cpu"

    def alone(self) -> Tensor:
        out = self.field if self.in_place else self.field.clone()
        for rows, value in [self._joined()] if self.on_device() else self.changes:
            out[to_device(rows, out.device)] = value.to(out)
        return out

    def together(self, others: Sequence[Written]) -> list[Tensor] | None:
        fields = [written.field for written in (self, *others)]
        if not self.in_place:
            out = torch.stack(fields)
            whole, starts = out.flatten(0, 1), torch.arange(len(fields)) * len(self.field)
            fields = list(out.unbind(0))
        else:
            found = one_memory(fields)
            if found is None:
                return None
            whole, starts = found
        changes = [written._joined() for written in (self, *others)]
        places = torch.cat([rows + start for (rows, _), start in zip(changes, starts, strict=True)])
        new = torch.cat([value for _, value in changes])
        whole.index_copy_(0, to_device(places, whole.device), new)
        return fields

    def _joined(self) -> tuple[Tensor, Tensor]:
        """The changes as one, with a row for each position."""
        shape = self.field.shape[1:]
        values = [value.to(self.field).expand(len(rows), *shape) for rows, value in self.changes]
        return torch.cat([rows for rows, _ in self.changes]), torch.cat(values)
