"""The weights of a mixture, none negative, all together 1, for which a quadratic form is least."""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = 1e-6
"""Smallest eigenvalue, as a share of the largest. What clients measure need not give a convex problem; with the floor it has one answer,
which moves only a little when the numbers do."""


def least(matrix: Tensor) -> Tensor | None:
    """a >= 0 with sum 1 that minimises a^T M a, in float64; eigenvalues below the floor are lifted to it first. None where M is not finite.

    Without the sum, min u^T M u + (sum u - 1)^2 over u >= 0 has its answer on the same ray: for a given sum s, the best u is s times the
    answer. That is a least-squares problem in numbers that are not negative, which Lawson and Hanson's active sets solve in few steps."""
    m = matrix.double()
    if not bool(torch.isfinite(m).all()):
        return None
    values, vectors = torch.linalg.eigh((m + m.T) / 2)
    n, largest = len(m), float(values.max()) if len(m) else 0.0
    if largest <= 0:  # nobody is better than anybody else
        return torch.full((n,), 1 / max(1, n), dtype=torch.float64)
    q = (vectors * (values / largest).clamp(min=FLOOR)) @ vectors.T + 1
    u, used = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.bool)
    for _ in range(10 * n):
        gain = torch.where(used, -torch.inf, 1 - q @ u)
        if float(gain.max()) <= 1e-12:
            break
        used[gain.argmax()] = True
        u, used = _settled(q, u, used)
    return u / u.sum()


def _settled(q: Tensor, u: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The best u on a set of entries; those that would become negative on the way there leave the set."""
    while True:
        best = torch.zeros_like(u)
        best[used] = torch.linalg.solve(q[used][:, used], torch.ones(int(used.sum()), dtype=torch.float64))
        bad = used & (best <= 0)
        if not bool(bad.any()):
            return best, used
        way = torch.where(bad, u / (u - best), torch.inf)
        u = u + way.min() * (best - u)
        used = used & (way > way.min()) & (u > 0)
        u = torch.where(used, u, 0.0)
