"""What keeps the model of an attacker near another one while it trains: a term of its loss, or a
projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.attacks.own_training import Own
from holdfast.core.flat import Layout
from holdfast.local.losses import Batch, Loss

_AIM = "aim/"


def aims(layout: Layout, models: Tensor) -> dict[str, Tensor]:
    """The parameters of models [n, size] as `aux` for `away`."""
    views = layout.unflatten(models)
    return {f"{_AIM}{slot.name}": views[slot.name] for slot in layout.slots if not slot.buffer}


def away(net: Any, batch: Batch) -> Tensor:
    """||w - aim||_2 over all parameters. Its gradient at w = aim, where it has none, is taken as 0."""
    lengths = [
        torch.linalg.vector_norm(value - batch.aux[f"{_AIM}{name}"])
        for name, value in net.named_parameters()
        if f"{_AIM}{name}" in batch.aux
    ]
    return torch.linalg.vector_norm(torch.stack(lengths))


def drawn(net: Any, batch: Batch, *, loss: Loss, near: float, share: float = 1.0) -> Tensor:
    """share * loss + near * ||w - aim||_2."""
    return share * loss(net, batch) + near * away(net, batch)


def within(layout: Layout, models: Tensor, centres: Tensor, radius: float | None) -> Tensor:
    """Models [n, size] whose parameters are projected onto the balls of this radius around the centres."""
    if radius is None:
        return models
    (new, buffers), (old, _) = layout.split(models), layout.split(centres)
    length = (new - old).double().norm(dim=1, keepdim=True).clamp(min=1e-300)
    return torch.cat([old + (new - old) * (radius / length).clamp(max=1).to(new), buffers], 1)


def by_epoch(own: Own, epochs: int, radius: float | None, **how: Any) -> Tensor:
    """The models of attackers after so many epochs; where there is a radius, they are projected after each of
    them, and the optimiser begins anew."""
    if radius is None:
        return own.fit(epochs=epochs, **how).model
    model = own.model
    for epoch in range(epochs):
        trained = own.fit(model, purpose=f"epoch {epoch}", epochs=1, **how).model
        model = within(own.local.network.layout, trained, own.model, radius)
    return model
