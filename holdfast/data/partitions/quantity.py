"""Clients of unlike sizes and like classes."""

from __future__ import annotations

from typing import Literal

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.registry import register, setting
from holdfast.data.partitions.base import Partition, apportion, cut


@register("partition", "quantity", paper="Li et al.: Federated Learning on Non-IID Data Silos, ICDE 2022")
class Quantity(Partition):
    """Some clients have much, most have little; all draw from all classes alike.

    dirichlet: sizes in proportion to one draw from Dirichlet(beta). power: the r-th largest client has
    r^-exponent times as much as the largest; which client is which is drawn.

    Counts: all samples are dealt, in these proportions, but min_samples at least to each; samples_per_client
    is the mean size here: that many times data.clients are dealt.

    """

    form: Literal["dirichlet", "power"] = setting(
        "dirichlet", "how sizes are drawn: dirichlet(beta) or power(exponent)"
    )
    beta: float = setting(0.5, "dirichlet: smaller is more skew", gt=0, le=1e6)
    exponent: float = setting(1.0, "power: larger is more skew, 0 none", ge=0, le=100)
    min_samples: int = setting(10, "smallest client", ge=0)

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> list[np.ndarray]:
        total = int(self.sizes(len(labels), clients).sum())
        if clients * self.min_samples > total:
            raise DataError(
                f"data.partition: {clients} clients x {self.min_samples} min_samples is more than the {total}"
                " samples to deal; lower min_samples or"
                f" {'raise samples_per_client' if self.samples_per_client else 'data.clients'}"
            )
        sizes = apportion(total, self._weights(clients, rng), self.min_samples)
        return cut(rng.permutation(len(labels))[:total], sizes)

    def _weights(self, clients: int, rng: np.random.Generator) -> np.ndarray:
        if self.form == "power":
            return rng.permutation(np.arange(1, clients + 1) ** -float(self.exponent))
        weights = rng.dirichlet(np.full(clients, self.beta))
        if not (
            np.isfinite(weights).all() and weights.sum() > 0
        ):  # a tiny beta underflows: one client takes it all
            weights = np.eye(clients)[rng.integers(clients)]
        return weights
