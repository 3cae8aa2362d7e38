"""Class means that clients send, for attacks that know only updates: to those who hold a class, its mean is
one vector, as an update is.

A client that does not hold a class has no mean of it, so it is neither counted among the others nor poisoned
there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.core.device import to_device
from holdfast.core.types import Field, Schema, Uplink


class Vote(NamedTuple):
    """What an attack on updates is shown of one class: those who hold it, and its mean as their update."""

    place: int | None
    """Which class; none where a field has no classes."""
    rows: Tensor
    """The places of the holders among all replies."""
    up: Uplink

    @property
    def schema(self) -> Schema:
        return {"update": Field("update", tuple(self.up["update"].shape[1:]))}

    def positions(self, mine: Tensor, classes: int) -> Tensor:
        """Where the means of the holders in `mine` stand among all means of all clients, client by client."""
        rows = self.rows[mine]
        return rows if self.place is None else rows * classes + self.place


def votes(name: str, schema: Schema, up: Uplink) -> Iterator[Vote]:
    """One for each class that any client holds, by the field that counts samples of each class; without such
    a field one of all clients."""
    held = next(
        (
            other
            for other, field in schema.items()
            if field.kind == "count" and field.shape == schema[name].shape[:1] != ()
        ),
        None,
    )
    holds = None if held is None else (up[held] > 0).cpu()
    for place in (None,) if holds is None else range(holds.shape[1]):
        rows = torch.arange(len(up)) if holds is None else holds[:, place].nonzero().flatten()
        there = to_device(rows, up[name].device)
        means = up[name][there] if place is None else up[name][there, place]
        if len(rows):
            yield Vote(place, rows, Uplink(up.ids[rows], {"update": means.flatten(1)}))
