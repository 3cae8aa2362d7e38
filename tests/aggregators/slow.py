"""Slow references, written as the papers have them: Python loops over clients and coordinates."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor


def far(x: Tensor) -> list[list[float]]:
    return [[float((a - b).square().sum()) for b in x] for a in x]


def krum_scores(
    d: list[list[float]], rows: list[int], f: int, power: float = 1.0, count: int | None = None
) -> dict[int, float]:
    count = max(1, len(rows) - f - 2) if count is None else count
    return {i: sum(sorted(d[i][j] ** power for j in rows if j != i)[:count]) for i in rows}


def repeated_krum(x: Tensor, f: int, m: int) -> list[int]:
    d, rows, chosen = far(x), list(range(len(x))), []
    for _ in range(m):
        scores = krum_scores(d, rows, f)
        chosen.append(min(rows, key=lambda i: (scores[i], i)))
        rows.remove(chosen[-1])
    return chosen


def bulyan(x: Tensor, f: int) -> list[float]:
    rows, out = repeated_krum(x, f, len(x) - 2 * f), []
    for column in x[rows].T.tolist():
        middle = statistics.median(column)
        out.append(statistics.mean(sorted(column, key=lambda v: abs(v - middle))[: len(x) - 4 * f]))
    return out


def linkage(apart: list[list[float]], complete: bool) -> set[frozenset[int]]:
    """Join the two nearest groups until two are left."""
    groups = [frozenset([i]) for i in range(len(apart))]
    while len(groups) > 2:
        pairs = [(a, b) for i, a in enumerate(groups) for b in groups[i + 1 :]]
        a, b = min(
            pairs, key=lambda pair: (max if complete else min)(apart[i][j] for i in pair[0] for j in pair[1])
        )
        groups = [g for g in groups if g not in (a, b)] + [a | b]
    return set(groups)


def foolsgold(cosines: list[list[float]]) -> list[float]:
    import math

    n = len(cosines)
    cs = [[0.0 if i == j else cosines[i][j] for j in range(n)] for i in range(n)]
    top = [max(row) for row in cs]
    cs = [[cs[i][j] * top[i] / top[j] if top[i] < top[j] else cs[i][j] for j in range(n)] for i in range(n)]
    wt = [min(1.0, max(0.0, 1 - max(row))) for row in cs]
    wt = [v / max(wt) for v in wt]
    wt = [0.99 if v == 1 else v for v in wt]
    return [0.0 if v == 0 else min(1.0, max(0.0, math.log(v / (1 - v)) + 0.5)) for v in wt]


def residual(
    x: Tensor, strictness: float = 2.0, threshold: float = 0.05, skip: int = 0
) -> tuple[list[float], list[float]]:
    import math

    n, d = x.shape
    total, kept = [0.0] * n, [[0.0] * d for _ in range(n)]
    for c in range(d):
        y = x[:, c].tolist()
        order = sorted(range(n), key=lambda i: (y[i], i))
        rank = {i: r for r, i in enumerate(order)}
        inner = [
            statistics.median([(y[i] - y[j]) / (rank[i] - rank[j]) for j in range(n) if j != i])
            for i in range(n)
        ]
        slope = statistics.median(inner)
        start = statistics.median(y) - slope * (n - 1) / 2
        line = [start + slope * rank[i] for i in range(n)]
        r = [y[i] - line[i] for i in range(n)]
        tau = 1.4826 * (1 + 5 / (n - 1)) * statistics.median(sorted(map(abs, r))[skip:]) + 1e-7
        spread = sum((k - (n - 1) / 2) ** 2 for k in range(n))
        z, conf = strictness * math.sqrt(2 / n), []
        for i in range(n):
            root, e = math.sqrt(1 - 1 / n - (rank[i] - (n - 1) / 2) ** 2 / spread), r[i] / tau
            conf.append(1.0 if e == 0 else root / e * max(-z, min(z, e / root)))
        for i in range(n):
            total[i] += conf[i] * statistics.stdev(conf)
            kept[i][c] = y[i] if conf[i] >= threshold else line[i]
    weights = [(t / max(total)) ** 2 for t in total]
    weights = [v / sum(weights) for v in weights]
    return [sum(weights[i] * kept[i][c] for i in range(n)) for c in range(d)], weights


def tensor(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
