"""FedCPA's score as the paper has it: Python sets, every pair on its own."""

from __future__ import annotations

import math

from torch import Tensor

Numbers = list[float]


def ranks(values: Numbers) -> Numbers:
    """From 1; equal values share the mean of theirs."""
    return [
        sum(other < v for other in values) + (sum(other == v for other in values) + 1) / 2 for v in values
    ]


def pearson(a: Numbers, b: Numbers) -> float:
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    da, db = [v - mean_a for v in a], [v - mean_b for v in b]
    length = math.sqrt(sum(v * v for v in da) * sum(v * v for v in db))
    return sum(x * y for x, y in zip(da, db, strict=True)) / length if length > 1e-12 else math.nan


def spearman(a: Numbers, b: Numbers) -> float:
    return pearson(ranks(a), ranks(b))


def critical(p: Numbers, k: int, largest: bool, nonzero: bool = False) -> set[int]:
    entries = [e for e in range(len(p)) if p[e] != 0 or not nonzero]
    return set(sorted(entries, key=lambda e: (-p[e] if largest else p[e], e))[:k])


def alike(
    p: Numbers,
    q: Numbers,
    k: int,
    largest: bool,
    corr=spearman,
    undefined: float = 0.5,
    nonzero: bool = False,
) -> float:
    mine, theirs = critical(p, k, largest, nonzero), critical(q, k, largest, nonzero)
    common = sorted(mine & theirs)
    rho = corr([p[e] for e in common], [q[e] for e in common]) if len(common) > 1 else math.nan
    jaccard = len(common) / max(1, len(mine | theirs))
    return jaccard + (undefined if math.isnan(rho) else (rho + 1) / 2)


def importances(x: Tensor, received: Tensor) -> list[Numbers]:
    return (x * (x + received)).abs().tolist()


def normality(
    local: list[Numbers],
    last: Numbers | None,
    k: int,
    top: bool = True,
    bottom: bool = True,
    others: bool = True,
    **options,
) -> Numbers:
    def sim(p: Numbers, q: Numbers) -> float:
        return sum(
            alike(p, q, k, largest, **options) for largest, used in ((True, top), (False, bottom)) if used
        )

    n, full = len(local), 2.0 * (top + bottom)
    out = []
    for i in range(n):
        mean = sum(full if i == j else sim(local[i], local[j]) for j in range(n)) / n
        out.append((mean if others else 0.0) + (0.0 if last is None else sim(local[i], last)))
    return out


def weights(scores: Numbers) -> Numbers:
    low, high = min(scores), max(scores)
    scaled = [min(0.99, max(0.01, (s - low) / (high - low))) for s in scores]
    return [min(1.0, max(0.0, math.log(s / (1 - s)) + 0.5)) for s in scaled]
