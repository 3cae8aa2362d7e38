"""MDA, minimum diameter averaging: the mean of the n - f clients that lie closest together (El Mhamdi et al.,
PODC 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.aggregators.geometry import distances, weighted
from holdfast.aggregators.ordered import arranged, by_id, equal_weights
from holdfast.core.columns import Reads
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = "El Mhamdi et al., Genuinely Distributed Byzantine Machine Learning, PODC 2020"
_ROUNDING = 1e-9


@register("aggregator", "mda", paper=PAPER)
class MDA(Aggregator):
    """The mean of the n - f updates with the smallest diameter: the largest distance between two of them.

    There are C(n, f) choices, of which few have to be looked at: n - f updates lie within a distance if f
    others can be taken out so that no pair farther apart is left (a vertex cover, searched by branching on
    the client with most such pairs), and the smallest such distance is found by bisection. That is exact, and
    fast where attackers are apart from the others; the worst case grows exponentially in f. A search that has
    looked at clients `limit` times is given up for the client with the nearest n - f - 1 others, and these:
    their diameter is at most twice the smallest. Such a round counts as a fallback. Of equally good choices
    the one with the lowest ids is taken. The weights returned are equal ones on the updates that were
    averaged."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": "mean of the n - f updates with the smallest largest distance between two of them",
        "weights returned": "equal, on those averaged",
        "variants and options": (
            "`limit`: a longer search is given up for the n - f updates around one, which counts as a "
            "fallback"
        ),
        "paper": "El Mhamdi et al. 2020",
    }
    reads: ClassVar[Reads] = "gram"
    uses_priors: ClassVar[bool] = False
    condition: ClassVar[str] = "n > 2f"
    keeps: ClassVar[frozenset[str]] = frozenset({"shift", "scale", "hull"})
    limit: int = setting(2_000_000, "how often an exact search looks at a client before it is given up", ge=0)

    def least(self, f: int) -> int:
        return 2 * f + 1

    def idle(self) -> bool:
        return self.f is None

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < self.least(ctx.assumed):
            return self.fall_back(x, state, ctx)
        weights, exact = self.shares(x, ctx.ids, ctx.assumed)
        return Reduced(weighted(weights, x), weights, state, fallback=not exact[0])

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < self.least(contexts[0].assumed):
            return self.fall_back_together(x, states, contexts)
        weights, exact = self.shares(x, ids_of(contexts), contexts[0].assumed)
        return separate(weighted(weights, x), weights, states, [not each for each in exact])

    def shares(self, x: Tensor, ids: Tensor, f: int) -> tuple[Tensor, list[bool]]:
        """The weights, and for each experiment whether the search was exact; it is made on the host."""
        n, order = x.shape[-2], by_id(ids, x)
        far = arranged(distances(x), order).cpu().view(-1, n, n)
        found = [closest_together(each.numpy(), f, self.limit) for each in far]
        exact = [places is not None for places in found]
        places = torch.tensor(
            [around_one(each, f) if kept is None else kept for each, kept in zip(far, found, strict=True)]
        )
        return equal_weights(order.gather(-1, places.to(x.device).view(*order.shape[:-1], n - f)), x), exact


def closest_together(far: np.ndarray, f: int, limit: int) -> list[int] | None:
    """The places of the n - f rows with the smallest largest distance; None where the search is too long."""
    search, sizes = _Search(limit), np.unique(far)
    low, high = 0, len(sizes) - 1
    try:
        while low < high:
            middle = (low + high) // 2
            if search.coverable(_beyond(far, sizes[middle]), (1 << len(far)) - 1, f):
                high = middle
            else:
                low = middle + 1
        return search.lowest(_beyond(far, sizes[low]), f)
    except _TooLong:
        return None


def around_one(far: Tensor, f: int) -> list[int]:
    """The places of the n - f rows around the one that has them nearest."""
    near, who = far.sort(dim=-1, stable=True)
    return sorted(who[int(near[:, len(far) - f - 1].argmin()), : len(far) - f].tolist())


def _beyond(far: np.ndarray, size: float) -> list[int]:
    """For each row the others that are farther away, as the bits of a number."""
    packed = np.packbits(far > size * (1 + _ROUNDING), axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


class _TooLong(Exception):
    """The search has looked at more clients than it may."""


class _Search:
    """Which clients to take out so that no link between two is left. Sets of clients are the bits of a
    number."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def coverable(self, links: list[int], there: int, f: int) -> bool:
        """Whether f of those that are there cover all links between them."""
        branches = [(there, f)]
        while branches:
            there, f = branches.pop()
            while f >= 0:
                degree = {client: (links[client] & there).bit_count() for client in _members(there)}
                self.limit -= len(degree)
                if self.limit < 0:
                    raise _TooLong
                widest = max(degree, key=degree.__getitem__, default=0)
                most = degree.get(widest, 0)
                if most == 0:
                    return True
                if sum(degree.values()) > 2 * most * f:
                    break  # each client covers no more links than that
                single = next((client for client, count in degree.items() if count == 1), None)
                if single is not None:  # its only neighbour covers no less than it does
                    there &= ~(links[single] & there)
                else:
                    if most > 2:  # else only circles are left, where any client will do
                        branches.append((there & ~links[widest], f - most))
                    there &= ~(1 << widest)
                f -= 1
        return False

    def lowest(self, links: list[int], f: int) -> list[int]:
        """Of the sets of n - f clients without a link between two, that with the lowest places."""
        n, there, left = len(links), (1 << len(links)) - 1, f
        for client in range(n):
            if not there >> client & 1:
                continue
            others = links[client] & there
            cost = others.bit_count()
            if cost == 0 or cost <= left and self.coverable(links, there & ~others, left - cost):
                there, left = there & ~others, left - cost
            else:
                there, left = there & ~(1 << client), left - 1
        return _members(there)[: n - f]


def _members(bits: int) -> list[int]:
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
