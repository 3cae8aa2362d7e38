"""FoolsGold: clients whose updates keep resembling those of another client lose their weight (Fung et al.,
RAID 2020, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced
from holdfast.aggregators.geometry import cosines
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = "Fung, Yoon and Beschastnikh, The Limitations of Federated Learning in Sybil Settings, RAID 2020"


@register("aggregator", "foolsgold", paper=PAPER)
class FoolsGold(Aggregator):
    """Weights fall with the largest cosine to another client's accumulated updates; honest clients are not
    punished for resembling a copy.

    Assumes that honest clients differ from each other more than the attackers do; it does not look at
    lengths, and a single attacker passes. The memory is one vector for every client seen so far, so it grows
    to clients x parameters and is saved with the run; without `memory` (FedCPA) only this round's updates are
    compared. Where all are alike, the mean of all is the fallback. The weights returned are FoolsGold's, as
    shares."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "a client that resembles another one loses weight",
        "weights returned": "FoolsGold's, as shares",
        "variants and options": (
            "`memory = false`: this round only (FedCPA's code); `divide_by = \"nothing\"`: the paper's "
            'plain sum, `"kept"`: FedCPA\'s'
        ),
        "paper": "Fung et al. 2020",
    }
    uses_priors: ClassVar[bool] = False
    keeps: ClassVar[frozenset[str]] = frozenset({"scale"})
    memory: bool = setting(
        True, "compare the sums of all updates so far; false: those of this round only (FedCPA)"
    )
    divide_by: Literal["weights", "nothing", "kept"] = setting(
        "weights",
        "divisor of the weighted sum: the sum of weights, nothing (the paper), or the number of clients"
        " with any weight (FedCPA)",
    )

    def remembers(self) -> str:
        return "clients" if self.memory else ""

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if self.memory:
            state, alike = remember(state, x, ctx.ids)
        else:
            alike = cosines(x)
        weights = weights_of(alike, max(1e-9, 100 * torch.finfo(x.dtype).eps)).to(x.dtype)
        total = weights.sum()
        if not bool(total > 0):
            equal = torch.full_like(weights, 1 / len(x))
            return Reduced(equal @ x, equal, state, fallback=True)
        divisor = {"weights": total, "nothing": torch.ones_like(total), "kept": (weights > 0).sum()}[
            self.divide_by
        ]
        return Reduced((weights / divisor) @ x, weights / total, state)


def weights_of(alike: Tensor, rounding: float = 1e-9) -> Tensor:
    """In [0, 1] from the cosines, which are exact up to rounding; all zero where everyone has a twin."""
    alike = alike.clone().fill_diagonal_(0)
    most = alike.amax(dim=1)
    mine, other = most[:, None], most[None, :]
    alike = torch.where(
        mine < other, alike * mine / other, alike
    )  # pardoning: less alike to a client that is alike to many
    weights = (1 - alike.amax(dim=1)).clamp_(0, 1)
    weights = torch.where(
        weights > rounding, weights, 0
    )  # of twins rounding leaves a trace, which would become the largest weight
    weights = (weights / weights.max()).nan_to_num_(nan=0.0).clamp_(max=0.99)
    return (torch.logit(weights) + 0.5).clamp_(0, 1)


def remember(state: State, x: Tensor, ids: Tensor) -> tuple[State, Tensor]:
    """The memory with this round added, and the cosines between this round's clients in it. It never shares
    its tensors with x or with the memory before, which are others' to write into or to keep: one copy of the
    rows, and no other where everyone takes part."""
    ids = ids.to(x.device)
    known = state.get("ids", ids[:0])
    everyone = torch.cat([known, ids]).unique()
    mine = torch.searchsorted(everyone, ids)
    if not len(known):
        history = x.new_empty(x.shape).index_copy_(0, mine, x)
    elif torch.equal(known, ids):
        history = x + state["history"]
    else:
        history = x.new_zeros(len(everyone), x.shape[1])
        history.index_copy_(0, torch.searchsorted(everyone, known), state["history"])
        history.index_add_(0, mine, x)
    alike = cosines(history)[mine][:, mine] if len(mine) == len(everyone) else cosines(history[mine])
    return {"ids": everyone, "history": history}, alike
