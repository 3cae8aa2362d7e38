"""Classes divided unevenly, as most of the literature does."""

from __future__ import annotations

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.registry import register, setting
from holdfast.data.partitions.base import Partition, by_class, group_by_owner

_MOST = 2_000_000  # numbers drawn in all: a quarter of a second


@register(
    "partition",
    "dirichlet",
    paper="Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution, 2019",
)
class Dirichlet(Partition):
    """Each class is divided by proportions drawn from Dirichlet(beta).

    With cap, a client that already holds N/K samples gets no samples of later classes (as in PFLlib). The
    draw is repeated until the smallest client has min_samples.

    Counts: all samples are assigned, and a client has at least min_samples. Sizes differ, so
    samples_per_client is an upper bound: larger clients keep a random choice of that many.
    """

    beta: float = setting(0.5, "smaller: more skew (FedAS: .1, .3, .5; FedCPA: .5)", gt=0, le=1e6)
    min_samples: int = setting(10, "size of the smallest client (FedCPA: 10, PFLlib: 40)", ge=0)
    cap: bool = setting(True, "a client that holds its fair share, N/K, gets no samples of later classes")
    tries: int = setting(
        200,
        "number of draws before an error; fewer for many clients and classes, to stay below a second",
        ge=1,
    )

    def check_size(self, total: int, clients: int) -> None:
        if clients * self.min_samples > total:
            raise DataError(
                f"data.partition: {clients} clients x {self.min_samples} min_samples is more than the"
                f" {total} samples; lower min_samples or data.clients"
            )
        if self.samples_per_client and self.samples_per_client < self.min_samples:
            raise DataError(
                f"data.partition: samples_per_client {self.samples_per_client} is below min_samples"
                f" {self.min_samples}; raise samples_per_client or lower min_samples"
            )

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> list[np.ndarray]:
        self.check_size(len(labels), clients)
        groups = by_class(labels, rng)
        shares = self._draw([len(group) for group in groups], clients, rng)
        owner = np.concatenate([np.repeat(np.arange(clients), share) for share in shares])
        return group_by_owner(np.concatenate(groups), owner, clients, rng, self.samples_per_client)

    def _draw(self, class_sizes: list[int], clients: int, rng: np.random.Generator) -> np.ndarray:
        """Draw [classes, clients] numbers of samples. Only sizes are drawn again, so that a repetition is
        cheap."""
        best, tries = 0, max(1, min(self.tries, _MOST // (clients * len(class_sizes))))
        for _ in range(tries):
            shares = _shares(class_sizes, clients, self.beta, self.cap, rng)
            smallest = int(shares.sum(0).min())
            if smallest >= self.min_samples:
                return shares
            best = max(best, smallest)
        raise DataError(
            f"data.partition: {tries} draws with beta {self.beta:g} left one of {clients} clients below"
            f" {self.min_samples} min_samples (best: {best}); raise beta, lower min_samples or lower"
            " data.clients"
        )


def _shares(
    class_sizes: list[int], clients: int, beta: float, cap: bool, rng: np.random.Generator
) -> np.ndarray:
    """Draw [classes, clients] numbers of samples once."""
    most = sum(class_sizes) / clients if cap else np.inf
    held = np.zeros(clients, dtype=np.int64)
    shares = np.zeros((len(class_sizes), clients), dtype=np.int64)
    for index, size in enumerate(class_sizes):
        share = rng.dirichlet(np.full(clients, beta)) * (held < most)
        # a tiny beta can put all weight on clients that are full: one of the others takes the class
        if not share.sum() > 0:
            share[rng.choice(np.flatnonzero(held < most))] = 1.0
        reach = np.cumsum(share)
        # the last edge is exactly size, whatever the rounding
        edges = (reach / reach[-1] * size).astype(np.int64)
        shares[index] = np.diff(edges, prepend=0)
        held += shares[index]
    return shares
