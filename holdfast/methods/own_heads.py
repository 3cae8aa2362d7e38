"""For servers that keep a head for every client: the common model travels under the client's own head, and
updates are made relative to the common model again."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.core.flat import Wire
from holdfast.core.types import Exchange, Uplink
from holdfast.methods.context import Context
from holdfast.models.features import NO_HEAD


def head_of(ctx: Context) -> Tensor:
    """bool: which of the parameters that travel are the head's."""
    if ctx.head is None:
        raise ConfigError(NO_HEAD)
    return ctx.head


def under_own_heads(asked: Exchange, model: Tensor, head: Tensor, ids: Tensor, heads: Tensor) -> Exchange:
    """The request with the model under each client's own head, of those in `ids`, which are sorted; others
    get the model as it is."""
    known, pick = torch.isin(asked.to, ids), torch.zeros(len(asked.to), dtype=torch.int64)
    pick[known] = torch.arange(1, int(known.sum()) + 1)
    bank = model.repeat(int(known.sum()) + 1, 1)
    bank[1:, head.nonzero().flatten()] = heads[torch.searchsorted(ids, asked.to[known])]
    return replace(asked, bank=bank, pick=pick[:, None])


def as_of_one_model(up: Uplink, asked: Exchange, model: Tensor, wire: Wire) -> Uplink:
    """Updates as of the common model, although each client came from a head of its own: rules compare and
    average what they are given."""
    (start, _), (common, _) = wire.split(asked.sent_to(up.ids)), wire.split(model)
    return up.having(update=up["update"] + (start - common))
