"""Which clients each of several processes simulates, where they run one experiment together."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.core.columns import Ranks


@dataclass(frozen=True)
class Share:
    """A client belongs to one process for the whole run, which trains it and keeps its private rows."""

    ranks: Ranks
    owners: Tensor
    """int64[clients]: the rank of each client."""

    @classmethod
    def by_work(cls, ranks: Ranks, work: Tensor) -> Share:
        """Clients with the most work first, each to the rank that has least so far: every rank gets about the
        same."""
        owners = torch.zeros(len(work), dtype=torch.int64)
        least = [(0.0, rank) for rank in range(ranks.count)]
        order = torch.argsort(work, descending=True, stable=True)
        for client, amount in zip(order.tolist(), work[order].tolist(), strict=True):
            load, rank = heapq.heappop(least)
            owners[client] = rank
            # a client without samples is still work: it is asked and evaluated
            heapq.heappush(least, (load + max(float(amount), 1e-3), rank))
        return cls(ranks, owners)

    def of(self, ids: Tensor) -> Tensor:
        """The rank of each of these clients; the server's own pseudo-client belongs to the first."""
        return torch.where(ids < 0, 0, self.owners[ids.clamp(min=0)])

    def mine(self, ids: Tensor) -> Tensor:
        """bool: which of these clients this process has."""
        return self.of(ids) == self.ranks.rank
