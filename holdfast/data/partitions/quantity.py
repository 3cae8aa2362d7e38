"""Clients of different sizes with the same classes."""

from __future__ import annotations

from typing import Literal

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.registry import register, setting
from holdfast.data.partitions.base import Partition, apportion, cut


@register("partition", "quantity", paper="Li et al.: Federated Learning on Non-IID Data Silos, ICDE 2022")
class Quantity(Partition):
    """Some clients have many samples, most have few; all draw from all classes with the same distribution.

    dirichlet: sizes in proportion to one draw from Dirichlet(beta). power: the r-th largest client has
    r^-exponent times as much as the largest; the order of clients is drawn.

    Counts: all samples are assigned in these proportions, but at least min_samples to each;
    samples_per_client is the mean size: that many times data.clients are assigned.
    """

    form: Literal["dirichlet", "power"] = setting(
        "dirichlet", "distribution of the sizes: dirichlet(beta) or power(exponent)"
    )
    beta: float = setting(0.5, "dirichlet: smaller means more skew", gt=0, le=1e6)
    exponent: float = setting(1.0, "power: larger means more skew, 0 equal sizes", ge=0, le=100)
    min_samples: int = setting(10, "size of the smallest client", ge=0)

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> list[np.ndarray]:
        total = int(self.sizes(len(labels), clients).sum())
        if clients * self.min_samples > total:
            raise DataError(
                f"data.partition: {clients} clients x {self.min_samples} min_samples is more than the"
                f" {total} samples to assign; lower min_samples or"
                f" {'raise samples_per_client' if self.samples_per_client else 'data.clients'}"
            )
        sizes = apportion(total, self._weights(clients, rng), self.min_samples)
        return cut(rng.permutation(len(labels))[:total], sizes)

    def _weights(self, clients: int, rng: np.random.Generator) -> np.ndarray:
        if self.form == "power":
            return rng.permutation(np.arange(1, clients + 1) ** -float(self.exponent))
        weights = rng.dirichlet(np.full(clients, self.beta))
        # a tiny beta underflows: one client takes all samples
        if not (np.isfinite(weights).all() and weights.sum() > 0):
            weights = np.eye(clients)[rng.integers(clients)]
        return weights
