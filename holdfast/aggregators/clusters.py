"""Clusters of clients, found by scikit-learn by density (HDBSCAN). They are made in the order of the ids, so
that the order of replies does not matter, and on the host: what they read has a number for each pair of
clients.

Campello, Moulavi, Sander: Density-Based Clustering Based on Hierarchical Density Estimates, PAKDD 2013."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.aggregators.geometry import diagonal, seen_from
from holdfast.aggregators.ordered import arranged

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
