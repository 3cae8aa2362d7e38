"""A server's memory of the clients' last models, for methods that send clients the models of other clients
instead of one average.

It is two tensors of the server's state: `ids`, sorted, and `models`, one row for each. It holds only what
clients have sent."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from holdfast.core.types import State
from holdfast.methods.context import Context


def empty(ctx: Context) -> State:
    return {"ids": torch.zeros(0, dtype=torch.int64), "models": ctx.initial.new_zeros(0, len(ctx.initial))}


def remember(state: State, ids: Tensor, models: Tensor) -> State:
    """The state after these clients have sent these models: in place of their earlier ones, or as new
    rows."""
    known = torch.cat([state["ids"], ids]).unique()
    fresh = models.new_zeros(len(known), models.shape[1])
    fresh[torch.searchsorted(known, state["ids"])] = state["models"]
    fresh[torch.searchsorted(known, ids)] = models
    return {**state, "ids": known, "models": fresh}


def forget(state: State, ids: Iterable[int]) -> State:
    """The state after these clients were banned: their models are no longer sent to others."""
    stays = ~torch.isin(state["ids"], torch.tensor([*ids], dtype=torch.int64))
    return (
        state
        if bool(stays.all())
        else {**state, "ids": state["ids"][stays], "models": state["models"][stays]}
    )


def last_models(state: State, ids: Tensor, otherwise: Tensor) -> Tensor:
    """[n, size]: these clients' last models; `otherwise` for those that have sent none."""
    known, rows = torch.isin(ids, state["ids"]), otherwise.expand(len(ids), -1).clone()
    rows[known] = state["models"][torch.searchsorted(state["ids"], ids[known])]
    return rows
