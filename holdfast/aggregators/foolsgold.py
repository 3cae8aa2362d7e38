"""FoolsGold: clients whose updates keep resembling those of another client lose their weight (Fung et al.,
RAID 2020, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate, vectors
from holdfast.aggregators.geometry import cosines, diagonal, weighted
from holdfast.aggregators.ordered import arranged
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
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
    reads: ClassVar[Reads] = "gram"
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
        value, weights, usable = self.weigh(alike, x)
        return Reduced(value, weights, state, fallback=not bool(usable))

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if self.memory:
            states, alike = remember_together(states, x, ids_of(contexts))
        else:
            alike = cosines(x)
        value, weights, usable = self.weigh(alike, x)
        return separate(value, weights, states, [not good for good in usable.tolist()])

    def weigh(self, alike: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The aggregate, the weights as shares, and whether there are any; if not, it is the mean of all."""
        weights = weights_of(alike, max(1e-9, 100 * torch.finfo(x.dtype).eps)).to(x.dtype)
        total = weights.sum(dim=-1, keepdim=True)
        divisor = {
            "weights": total,
            "nothing": torch.ones_like(total),
            "kept": (weights > 0).sum(dim=-1, keepdim=True),
        }[self.divide_by]
        usable, even = total > 0, 1 / x.shape[-2]
        value = weighted(torch.where(usable, weights / divisor, even), x)
        return value, torch.where(usable, weights / total, even), usable[..., 0]


def weights_of(alike: Tensor, rounding: float = 1e-9) -> Tensor:
    """In [0, 1] from the cosines, which are exact up to rounding; all zero where everyone has a twin."""
    alike = alike.clone()
    diagonal(alike).fill_(0)
    most = alike.amax(dim=-1)
    mine, other = most[..., :, None], most[..., None, :]
    alike = torch.where(
        mine < other, alike * mine / other, alike
    )  # pardoning: less alike to a client that is alike to many
    weights = (1 - alike.amax(dim=-1)).clamp_(0, 1)
    weights = torch.where(
        weights > rounding, weights, 0
    )  # of twins rounding leaves a trace, which would become the largest weight
    weights = (weights / weights.amax(dim=-1, keepdim=True)).nan_to_num_(nan=0.0).clamp_(max=0.99)
    return (torch.logit(weights) + 0.5).clamp_(0, 1)


def remember(state: State, x: Tensor, ids: Tensor) -> tuple[State, Tensor]:
    """The memory with this round added, and the cosines between this round's clients in it. It never shares
    its tensors with x or with the memory before, which are others' to write into or to keep: one copy of the
    rows, and no other where everyone takes part."""
    state, mine = added(state, x, ids)
    history = state["history"]
    if len(mine) == len(history):
        return state, arranged(cosines(history), mine)
    return state, cosines(history[mine])


def added(state: State, x: Tensor, ids: Tensor) -> tuple[State, Tensor]:
    """The memory with this round added, and where in it this round's clients are."""
    known = state["ids"].to(ids.device) if "ids" in state else ids[:0]
    everyone = torch.cat([known, ids]).unique()
    mine = to_device(torch.searchsorted(everyone, ids), x.device)
    if not len(known):
        history = x.new_empty(x.shape).index_copy_(0, mine, x)
    elif torch.equal(known, ids):
        history = x + to_device(state["history"], x.device)
    else:
        places = to_device(torch.searchsorted(everyone, known), x.device)
        history = x.new_zeros(len(everyone), x.shape[1])
        history.index_copy_(0, places, to_device(state["history"], x.device))
        history.index_add_(0, mine, x)
    return {"ids": everyone, "history": history}, mine


def remember_together(states: Sequence[State], x: Tensor, ids: Tensor) -> tuple[list[State], Tensor]:
    """The same for several experiments, [c, n, d]. Where everyone took part in every round so far, their
    memories stay one tensor."""
    before = [state.get("ids", own[:0]).to(own.device) for state, own in zip(states, ids, strict=True)]
    if all(torch.equal(known, own) for known, own in zip(before, ids, strict=True)):
        history = x + vectors([state["history"] for state in states], x)
        kept = zip(ids.clone(), history, strict=True)
        return [{"ids": own, "history": rows} for own, rows in kept], cosines(history)
    found = [added(*of) for of in zip(states, x, ids, strict=True)]
    rows = torch.stack([state["history"][mine] for state, mine in found])
    return [state for state, _ in found], cosines(rows)
