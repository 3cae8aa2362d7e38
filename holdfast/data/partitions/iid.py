"""Clients with the same distribution."""

from __future__ import annotations

import numpy as np

from holdfast.core.registry import register
from holdfast.data.partitions.base import Partition, cut


@register("partition", "iid")
class Iid(Partition):
    """Every client draws from all classes with the same distribution.

    Counts: all samples are assigned, sizes differ by at most one; or samples_per_client each.
    """

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> list[np.ndarray]:
        sizes = self.sizes(len(labels), clients)
        return cut(rng.permutation(len(labels))[: sizes.sum()], sizes)
