"""Clients with one class each."""

from __future__ import annotations

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.registry import register
from holdfast.data.partitions.base import Partition, by_class, even, group_by_owner


@register("partition", "single-label", paper="C-PFL")
class SingleLabel(Partition):
    """Client i holds samples of one class only, the (i mod C)-th of the C classes that occur.

    Counts: all samples of the classes that have a client are assigned, a class in shares that differ by at
    most one; or samples_per_client each. With fewer clients than classes, the last classes have no client.
    """

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> list[np.ndarray]:
        self.check_size(len(labels), clients)
        groups = by_class(labels, rng)
        positions, owners = [], []
        for index, group in enumerate(groups[:clients]):
            takers = np.arange(index, clients, len(groups))
            wanted = len(takers) * (self.samples_per_client or 1)
            if wanted > len(group):
                remedy = "samples_per_client or data.clients" if self.samples_per_client else "data.clients"
                raise DataError(
                    f"data.partition: class {labels[group[0]]} has {len(group)} samples but its {len(takers)}"
                    f" clients need {wanted}; lower {remedy}"
                )
            sizes = even(wanted if self.samples_per_client else len(group), len(takers))
            positions.append(group[: sizes.sum()])
            owners.append(np.repeat(takers, sizes))
        return group_by_owner(np.concatenate(positions), np.concatenate(owners), clients, rng)
