"""Clusters of clients, found by scikit-learn: by density (HDBSCAN), around means, and by mean shift. All work
in the order of the ids, so that the order of replies does not matter, and on the host: what they read has a
number for each pair of clients, or a few for each client.

Campello, Moulavi, Sander: Density-Based Clustering Based on Hierarchical Density Estimates, PAKDD 2013.
Tibshirani, Walther, Hastie: Estimating the Number of Clusters in a Data Set via the Gap Statistic, Journal of
the Royal Statistical Society B 63, 2001."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.aggregators.geometry import diagonal, seen_from
from holdfast.aggregators.ordered import arranged
from holdfast.core.keys import Key

NOISE = -1
"""The label of a client that belongs to no cluster."""
_STEP = 2.0**-40
"""Distances of directions are counted in such steps: what rounding alone makes of equal ones decides
nothing."""
_SHORTEST = 1e-9
"""The least distance of two clients, as a share of the largest: HDBSCAN divides by distances."""


def directions_apart(x: Tensor, centre: Tensor | None = None) -> Tensor:
    """[..., n, n] in float64: the cosine distances (1 - cosine) of the rows as they lie to a centre [..., d].
    A row of zeros, or one that is too long to be squared, is at a right angle to all others."""
    products = seen_from(x, torch.zeros_like(x[..., 0, :]) if centre is None else centre)
    lengths = diagonal(products).sqrt()
    cosines = products / (lengths[..., :, None] * lengths[..., None, :])
    apart = 1 - cosines.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(-1, 1)
    apart = ((apart + apart.mT) / 2 / _STEP).round_() * _STEP
    diagonal(apart).fill_(0)
    return apart


def features_apart(features: Tensor) -> Tensor:
    """[n, n] in float64: the Euclidean distances of a few numbers for each client [n, k]; of equal rows
    exactly 0."""
    rows = features.double()
    return torch.stack([(rows - row).square_().sum(dim=1).sqrt_() for row in rows])


def by_density(apart: Tensor, ids: Tensor, least: int, neighbours: int = 1, single: bool = False) -> Tensor:
    """int64[n]: the cluster of each client by HDBSCAN from their distances [n, n]; NOISE: none.

    `least` is the size of the smallest cluster, `neighbours` how many others a client must have near it (1:
    distances as they are; scikit-learn counts the client itself, the library hdbscan does not), `single`
    whether all may be one cluster. Clients that are all equal are one cluster in any case."""
    n, order = len(apart), ids.argsort()
    table = arranged(apart.cpu(), order)
    largest = float(table.max())
    found = torch.full((n,), NOISE)
    if n < max(2, least):
        return found
    if largest == 0:
        return torch.zeros_like(found)
    from sklearn.cluster import HDBSCAN  # takes a second and fifty megabytes, which only a server needs

    table = table.clamp(min=_SHORTEST * largest)
    diagonal(table).fill_(0)
    labels = HDBSCAN(
        min_cluster_size=max(2, least),
        min_samples=min(n, neighbours + 1),
        metric="precomputed",
        allow_single_cluster=single,
        copy=True,
    ).fit_predict(table.numpy())
    return found.index_copy_(0, order, torch.as_tensor(labels, dtype=torch.int64))


def together_apart(labels: Tensor) -> Tensor:
    """[n, n]: 0 for two clients of the same cluster, 1 for others; a client without a cluster is apart from
    all."""
    same = (labels[:, None] == labels) & (labels != NOISE)
    apart = 1 - same.double()
    diagonal(apart).fill_(0)
    return apart


def by_mean_shift(features: Tensor, ids: Tensor) -> Tensor:
    """int64[n]: the cluster of each client by mean shift over its features [n, k]; NOISE: none. The bandwidth
    is the mean distance to the half of the clients that are nearest."""
    order = ids.argsort()
    rows = features.double().cpu()[order]
    found = torch.zeros(len(rows), dtype=torch.int64)
    if not bool((rows != rows[:1]).any()):
        return found
    from sklearn.cluster import MeanShift, estimate_bandwidth

    width = float(estimate_bandwidth(rows.numpy(), quantile=0.5))
    spread = float(rows.amax(0).sub(rows.amin(0)).max())
    labels = MeanShift(bandwidth=max(width, _SHORTEST * spread), cluster_all=False).fit_predict(rows.numpy())
    return found.index_copy_(0, order, torch.as_tensor(labels, dtype=torch.int64))


def largest_cluster(labels: Tensor, ids: Tensor) -> Tensor:
    """bool[n]: the cluster with most clients; of equally large ones that with the lowest id. Nobody, where
    all are noise."""
    best, members = (0, 0), torch.zeros(len(labels), dtype=torch.bool)
    for label in labels[labels != NOISE].unique().tolist():
        mine = labels == label
        rank = int(mine.sum()), -int(ids[mine].min())
        if not bool(members.any()) or rank > best:
            best, members = rank, mine
    return members


def two_means(scores: Tensor, ids: Tensor, key: Key) -> Tensor:
    """bool[n]: the side with the larger mean, of two clusters of numbers [n] by k-means."""
    order = ids.argsort()
    values = scores.double()[order].numpy()[:, None]
    labels = torch.as_tensor(_k_means(values, 2, key).labels_, dtype=torch.bool)
    if bool(labels.any()) and values[labels.numpy()].mean() < values[~labels.numpy()].mean():
        labels = ~labels
    return torch.zeros_like(labels).index_copy_(0, order, labels)


def number_of_clusters(scores: Tensor, ids: Tensor, most: int, references: int) -> int:
    """How many clusters the numbers [n] form, by the gap statistic: the smallest k with gap(k) >= gap(k + 1)
    - s(k + 1), where the gap is the difference of the mean log dispersion of uniform numbers and of these."""
    values = scores.double()[ids.argsort()].numpy()[:, None]
    low, high = values.min(), values.max()
    most = min(most, len(values) - 1)
    if most < 2 or not high > low:
        return 1
    values = (values - low) / (high - low)
    expected = _dispersions_of_uniform(len(values), most, references)
    own = [_log_dispersion(values, k, Key(0).fold("gap", k)) for k in range(1, most + 1)]
    gaps = [mean - mine for (mean, _), mine in zip(expected, own, strict=True)]
    for k in range(1, most):
        if gaps[k - 1] >= gaps[k] - expected[k][1]:
            return k
    return most


@lru_cache(maxsize=64)
def _dispersions_of_uniform(n: int, most: int, references: int) -> tuple[tuple[float, float], ...]:
    """For k = 1, ..., most: the mean log dispersion of n uniform numbers, and its standard error s. It
    depends on nothing else, so it is found once."""
    key, out = Key(0).fold("references", n), []
    for k in range(1, most + 1):
        found = [
            _log_dispersion(
                key.fold(turn).uniform(n, dtype=torch.float64).numpy()[:, None], k, key.fold(turn, k)
            )
            for turn in range(references)
        ]
        out.append((float(np.mean(found)), float(np.std(found) * np.sqrt(1 + 1 / references))))
    return tuple(out)


def _log_dispersion(values: Any, k: int, key: Key) -> float:
    return float(np.log(max(_k_means(values, k, key).inertia_, 1e-12)))


def _k_means(values: Any, k: int, key: Key) -> Any:
    from sklearn.cluster import KMeans

    return KMeans(n_clusters=k, n_init=3, random_state=key.seed() % 2**32).fit(values)
