"""Clients that are all alike."""

from __future__ import annotations

import numpy as np

from holdfast.core.registry import register
from holdfast.data.partitions.base import Partition, cut


@register("partition", "iid")
class Iid(Partition):
    """Every client draws from all classes alike.

    Counts: all samples are dealt, sizes differ by one at most; or samples_per_client each.
    """

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> list[np.ndarray]:
        sizes = self.sizes(len(labels), clients)
        return cut(rng.permutation(len(labels))[: sizes.sum()], sizes)
