"""Quantiles of Student's t distribution, for whole degrees of freedom: the few lines that are needed of a statistics library."""

from __future__ import annotations

import math


def cdf(t: float, df: int) -> float:
    """P(T <= t). For whole degrees of freedom the distribution function is a finite sum in the angle atan(t / sqrt(df)) (Abramowitz and
    Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    square = math.cos(angle) ** 2
    odd = df % 2
    term = math.cos(angle) if odd else 1.0
    total = term if df > 1 else 0.0
    for k in range(2 + odd, df, 2):  # cos^k times 2/3 * 4/5 ... or 1/2 * 3/4 ...
        term *= square * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + inside / 2


def quantile(p: float, df: int) -> float:
    """The t with P(T <= t) = p, by halving an interval until floats run out."""
    if p < 0.5:
        return -quantile(1 - p, df)
    low, high = 0.0, 1.0
    while cdf(high, df) < p:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if cdf(middle, df) < p else (low, middle)
    return high
