"""Clients whose samples are partly drawn from all data and partly sorted by label."""

from __future__ import annotations

import numpy as np

from holdfast.core.registry import register, setting
from holdfast.data.partitions.base import Partition, cut


@register("partition", "similarity", paper="Karimireddy et al.: SCAFFOLD, ICML 2020")
class Similarity(Partition):
    """A share of each client's samples is drawn from all data; the rest is sorted by label and cut into one
    piece per client.

    0 % gives clients with one or two classes, 100 % clients with the same distribution; neighbours have
    neighbouring classes.

    Counts: all samples are assigned, sizes differ by at most one; or samples_per_client each. Of a client's n
    samples, round(n * percent / 100) are of the first kind.
    """

    percent: float = setting(
        20.0, "percentage of a client's samples that is drawn from all data (FedCAP: 20)", ge=0, le=100
    )

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> list[np.ndarray]:
        sizes = self.sizes(len(labels), clients)
        alike = np.floor(sizes * self.percent / 100 + 0.5).astype(np.int64)
        mixed = rng.permutation(len(labels))[: sizes.sum()]
        common, rest = np.split(mixed, [alike.sum()])
        ordered = rest[np.argsort(labels[rest], kind="stable")]
        both = zip(cut(common, alike), cut(ordered, sizes - alike), strict=True)
        return [np.sort(np.concatenate(pieces)) for pieces in both]
