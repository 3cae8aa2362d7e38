"""Divide-and-conquer: leaves out the updates that deviate most along the direction of largest spread
(Shejwalkar and Houmansadr, NDSS 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.aggregators.geometry import CUDA_BLOCK, product, weighted
from holdfast.aggregators.ordered import by_id, equal_weights
from holdfast.core.columns import Reads, current
from holdfast.core.device import to_device
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = (
    "Shejwalkar and Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses,"
    " NDSS 2021"
)


@register("aggregator", "dnc", paper=PAPER)
class DnC(Aggregator):
    """The mean without the c f updates that deviate most along the first principal direction, in any of
    several passes.

    Each pass uses a random subset of the coordinates; an update that is left out once stays out. Assumes that
    what attackers have in common is the largest spread there is. Where no update is left, the median is the
    fallback. The weights returned are equal ones on the updates that were averaged."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": (
            "leaves out updates that deviate along the first principal direction of random coordinates"
        ),
        "weights returned": "equal, on those averaged",
        "variants and options": "`iterations`, `coordinates`, `c`",
        "paper": "Shejwalkar and Houmansadr 2021",
    }
    reads: ClassVar[Reads] = "gram"
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n > 2f and n > c f"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})
    iterations: int = setting(5, "number of subsets of coordinates", ge=1)
    coordinates: int = setting(10_000, "most coordinates in a subset", ge=1)
    c: float = setting(1.0, "updates left out for each assumed attacker", gt=0)

    def least(self, f: int) -> int:
        return max(2 * f, int(self.c * f)) + 1

    def idle(self) -> bool:
        return self.f is None

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        good = self.good(x, ctx.ids, ctx.key, ctx.assumed)
        if not bool(good.any()):
            return self.fall_back(x, state, ctx)
        weights = equal_weights(good.nonzero().flatten(), x)
        return Reduced(weighted(weights, x), weights, state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        key = Key(torch.stack([ctx.key.bits for ctx in contexts]))
        good = self.good(x, ids_of(contexts), key, contexts[0].assumed)
        count = good.sum(dim=-1, keepdim=True)
        weights = torch.where(good, 1 / count.double(), 0).to(x.dtype)
        found = separate(weighted(weights, x), weights, states)
        return [
            result if some else self.fall_back(*of)
            for result, some, *of in zip(found, count[:, 0].tolist(), x, states, contexts, strict=True)
        ]

    def good(self, x: Tensor, ids: Tensor, key: Key, f: int) -> Tensor:
        """bool[..., n]: which updates no pass leaves out."""
        shared, n = current(), x.shape[-2]
        d = x.shape[-1] if shared is None else shared.total
        keep, order = n - int(self.c * f), by_id(ids, x)
        good = torch.ones_like(order, dtype=torch.bool)
        for step in range(self.iterations if keep < n else 0):
            scores = self.scores(x, order, key.fold("coordinates", step))
            best = order.gather(-1, scores.argsort(dim=-1, stable=True)[..., :keep])
            good &= torch.zeros_like(good).scatter_(-1, best, True)
            if d <= self.coordinates:
                break  # the next pass would use the same coordinates
        return good

    def scores(self, x: Tensor, order: Tensor, key: Key) -> Tensor:
        """By some coordinates, which differ among experiments; as many of these at a time as there is room
        for. In the order of ids: equal updates stay equal in any order of replies."""
        *several, n, d = x.shape
        some = min(d, self.coordinates)
        bits = to_device(key.bits, x.device)
        if not several:
            return _standing_out(_drawn(x, order, Key(bits), self.coordinates))
        found = []
        size = max(1, CUDA_BLOCK // max(4 * d, n * some, 1))
        for part in range(0, len(x), size):
            here = slice(part, part + size)
            columns = Key(bits[here]).hash(d).topk(some, largest=False).indices
            values = x[here].gather(-1, columns[:, None, :].expand(-1, n, -1))
            values = values.gather(-2, order[here, :, None].expand(values.shape))
            found.append(_standing_out(values.double()))
        return torch.cat(found)


def _drawn(x: Tensor, order: Tensor, key: Key, coordinates: int) -> Tensor:
    """So many random coordinates, rows in this order. Where several processes share the rows, each hands out
    those of its own; they are put in the order in which one process draws them."""
    shared = current()
    d = x.shape[1] if shared is None else shared.total
    columns = key.hash(d).topk(min(d, coordinates), largest=False).indices
    if shared is None:
        return x[order[:, None], columns].double()
    own, (columns, places) = shared.of_rank(shared.ranks.rank), columns.sort()
    mine = columns[(columns >= own.start) & (columns < own.stop)] - own.start
    found = shared.whole(x[order[:, None], mine])
    return torch.empty_like(found).index_copy_(1, places, found).double()


def _standing_out(x: Tensor) -> Tensor:
    """Squared projections on the top right singular vector of the centred rows, from the [n, n] product
    instead of a decomposition. Writes into x."""
    x -= x.mean(dim=-2, keepdim=True)
    scale = torch.maximum(x.amax(dim=(-2, -1), keepdim=True), -x.amin(dim=(-2, -1), keepdim=True))
    x /= torch.where(scale > 0, scale, 1)
    return torch.linalg.eigh(product(x, x.mT)).eigenvectors[..., -1].square()
