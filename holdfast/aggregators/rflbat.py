"""RFLBAT: principal components and clusters of updates; the cluster with the smallest cosines is averaged
(Wang, Zhai, Zhan, Xia: RFLBAT: A Robust Federated Learning Algorithm against Backdoor Attack, 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, ids_of, separate
from holdfast.aggregators.geometry import cosines, distances, weighted
from holdfast.core.columns import Reads
from holdfast.core.device import to_device
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import State

PAPER = "Wang et al., RFLBAT: A Robust Federated Learning Algorithm against Backdoor Attack, 2022"
Array = np.ndarray[Any, Any]
_DIGITS = 9
"""What differs less than this many digits show is a tie: rounding alone decides nothing."""


@register("aggregator", "rflbat", paper=PAPER)
class RFLBAT(Aggregator):
    """The weighted mean of one cluster of updates, found in the plane of their first two principal
    components.

    1. A client whose summed distances to the others in that plane are more than `far` times the median of
    these sums is left out. 2. The coordinates, each spread over 0 to 1, are clustered by k-means; the gap
    statistic (Tibshirani et al. 2001) says how many clusters there are, up to `most`. 3. Of each cluster the
    median of its clients' mean cosines with the others of the cluster is taken, and the cluster of the
    smallest is averaged: backdoored updates resemble one another more than honest ones do. A cluster of one
    counts as 1. 4. Step 1 again within the cluster, with `near`.

    Assumes nothing about how many attackers there are, but that honest clients differ: attackers whose
    updates differ more than theirs win. The reference numbers of the gap statistic are drawn once for a size
    of cohort. The weights returned are the incoming ones of the clients that are left, as shares. With fewer
    than three clients there is nothing to cluster; then, and where all updates are too long to be squared,
    the median is the fallback. Among fewer than six clients a single one is never far enough to be left out,
    because its sum of distances is at most four times the others': there the rule can be the weighted mean.
    """

    in_docs: ClassVar[Mapping[str, str]] = {
        "what it does": (
            "k-means in the plane of two principal components, weighted mean of the cluster of the smallest"
            " cosines"
        ),
        "weights returned": "the incoming ones of that cluster",
        "variants and options": "`far`, `near`: how far off a client may be; `most` clusters, `references`",
        "paper": "Wang et al. 2022",
    }
    reads: ClassVar[Reads] = "gram"
    keeps: ClassVar[frozenset[str]] = frozenset({"scale"})
    condition: ClassVar[str] = "n >= 3"
    far: float = setting(10.0, "largest sum of distances in median sums, before clusters are made", ge=1)
    near: float = setting(4.0, "the same within the cluster that is believed", ge=1)
    most: int = setting(10, "most clusters", ge=1)
    references: int = setting(5, "sets of uniform numbers that the gap statistic compares with", ge=2)

    def least(self, f: int) -> int:
        return 3

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        if len(x) < 3:
            return self.fall_back(x, state, ctx)
        kept = self.believed(distances(x).cpu(), cosines(x).cpu(), ctx.ids)
        if not bool(kept.any()):
            return self.fall_back(x, state, ctx)
        weights = to_device(_shares(w.cpu(), kept), x.device)
        return Reduced(weighted(weights, x), weights, state)

    def together(
        self, x: Tensor, w: Tensor, states: Sequence[State], contexts: Sequence[AggregationContext]
    ) -> list[Reduced]:
        if x.shape[1] < 3:
            return self.fall_back_together(x, states, contexts)
        tables = zip(distances(x).cpu(), cosines(x).cpu(), ids_of(contexts), strict=True)
        kept = [self.believed(*table) for table in tables]
        weights = torch.stack([_shares(own, some) for own, some in zip(w.cpu(), kept, strict=True)])
        weights = to_device(weights, x.device)
        found = separate(weighted(weights, x), weights, states)
        return [
            result if bool(some.any()) else self.fall_back(*of)
            for result, some, *of in zip(found, kept, x, states, contexts, strict=True)
        ]

    def believed(self, squares: Tensor, alike: Tensor, ids: Tensor) -> Tensor:
        """bool[n], from squared distances and cosines [n, n] on the host."""
        order = ids.argsort()  # whatever the order of the rows
        apart, close = squares[order][:, order].numpy(), alike[order][:, order].numpy()
        places = _reachable(apart)
        if len(places) > 2:
            plane = principal_plane(apart[np.ix_(places, places)])
            near = _not_far(plane, self.far)
            places, plane = places[near], plane[near]
            labels = self.clusters(plane)
            mine = labels == _least_alike(close[np.ix_(places, places)], labels)
            places = places[mine][_not_far(plane[mine], self.near)]
        found = torch.zeros(len(ids), dtype=torch.bool)
        found[order[torch.as_tensor(places)]] = True
        return found

    def clusters(self, plane: Array) -> Array:
        """int[n]: the cluster of each point. Their number is the smallest k whose gap is at least that of k +
        1 less its standard error."""
        low, high = plane.min(0), plane.max(0)
        points = ((plane - low) / np.where(high > low, high - low, 1)).round(_DIGITS)
        most = min(self.most, len(np.unique(points, axis=0)))
        labels, spread = k_means(points, 1)
        for k in range(1, most):
            more, less = k_means(points, k + 1)
            (here, _), (there, error) = (_references(len(points), of, self.references) for of in (k, k + 1))
            if here - _log(spread) >= there - _log(less) - error:
                break
            labels, spread = more, less
        return labels


def principal_plane(squares: Array) -> Array:
    """[n, 2]: the coordinates of points along their first two principal components, from their squared
    distances; of the two directions of a component that in which the largest coordinate is positive."""
    middle = squares - squares.mean(0) - squares.mean(1)[:, None] + squares.mean()
    sizes, vectors = np.linalg.eigh(-middle / 2)
    sizes, vectors = sizes[-2:][::-1], vectors[:, -2:][:, ::-1]
    sizes = np.where(sizes > 1e-12 * max(sizes[0], 0), sizes, 0)  # the rest is rounding
    plane = vectors * np.sqrt(sizes)
    sign = np.sign(plane[np.abs(plane.round(_DIGITS)).argmax(0), range(plane.shape[1])])
    return plane * np.where(sign == 0, 1, sign)


def k_means(points: Array, k: int) -> tuple[Array, float]:
    """The labels of k clusters and the sum of squared distances to their centres, the best of three starts;
    infinite where none gave so many."""
    from scipy.cluster.vq import ClusterError, kmeans2

    best = (
        np.zeros(len(points), dtype=np.int64),
        np.inf if k > 1 else float(np.square(points - points.mean(0)).sum()),
    )
    for turn in range(3 if k > 1 else 0):
        luck = Key(0).fold("k-means", k, turn).numpy()
        try:
            centres, labels = kmeans2(points, k, iter=30, minit="++", seed=luck, missing="raise")
        except ClusterError:  # a cluster lost its last point
            continue
        inner = float(np.square(points - centres[labels]).sum())
        if inner < best[1]:
            best = labels, inner
    return best


@lru_cache(maxsize=4096)
def _references(n: int, k: int, sets: int) -> tuple[float, float]:
    """The mean log dispersion of sets of n points that are uniform in the unit square, in k clusters, and its
    standard error: what no cluster at all looks like."""
    key = Key(0).fold("references", n)
    drawn = [key.fold(turn).uniform(n, 2, dtype=torch.float64).numpy() for turn in range(sets)]
    found = [_log(k_means(points, k)[1]) for points in drawn]
    return float(np.mean(found)), float(np.std(found) * np.sqrt(1 + 1 / sets))


def _log(spread: float) -> float:
    return float(np.log(max(spread, 10.0**-_DIGITS)))


def _reachable(squares: Array) -> Array:
    """The places of those that are not infinitely far from all others."""
    return np.flatnonzero(np.isinf(squares).sum(1) < max(1, len(squares) - 1))


def _not_far(plane: Array, times: float) -> Array:
    """bool[n]: whose summed distances to the others are at most so many medians of these sums."""
    sums = np.linalg.norm(plane[:, None] - plane, axis=-1).sum(1)
    return sums <= times * np.median(sums) * (1 + 1e-12)


def _least_alike(close: Array, labels: Array) -> int:
    """The cluster of the smallest median of mean cosines; of equal ones that with the lowest id."""
    scores: dict[int, float] = {}
    for label in dict.fromkeys(labels.tolist()):
        mine = np.flatnonzero(labels == label)
        if len(mine) < 2:
            scores[label] = 1.0
            continue
        inner = close[np.ix_(mine, mine)]
        means = (inner.sum(1) - inner.diagonal()) / (len(mine) - 1)
        scores[label] = round(float(np.median(means)), _DIGITS)
    return min(scores, key=lambda label: scores[label])


def _shares(w: Tensor, kept: Tensor) -> Tensor:
    total = w[kept].sum()
    return torch.where(kept, w / total if bool(total > 0) else 1 / kept.sum().clamp(min=1), 0).to(w.dtype)
