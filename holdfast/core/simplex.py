"""The weights of a mixture (non-negative, with sum 1) that minimise a quadratic form."""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = 1e-6
"""Smallest eigenvalue, as a share of the largest. Measurements of clients need not give a convex problem;
with the floor there is one answer, which changes little when the numbers change little."""


def least(matrix: Tensor) -> Tensor | None:
    """a >= 0 with sum 1 that minimises a^T M a, in float64; eigenvalues below the floor are lifted to it
    first. None where M is not finite, or its entries differ too much in size for floating point.

    Every client is measured in units of its own diagonal entry before eigenvalues are lifted; else one client
    with absurd numbers would lift all others to one value, and their differences would be lost.

    Without the sum, min u^T M u + (sum u - 1)^2 over u >= 0 has its answer on the same ray: for a given sum
    s, the best u is s times the answer. That is a least-squares problem in numbers that are not negative,
    which Lawson and Hanson's active sets solve in few steps."""
    m = (matrix.double() + matrix.double().T) / 2
    unit = _units(m)
    even = m * unit[:, None] * unit
    if not bool(torch.isfinite(even).all()):
        return None
    n, lifted = len(m), _lifted(even)
    if lifted is None:  # all clients are equally good
        return torch.full((n,), 1 / max(1, n), dtype=torch.float64)
    aim = unit / unit.max()  # the sum is that of unit * b
    q = lifted + torch.outer(aim, aim)
    b, used = _begun(q, aim)
    for _ in range(10 * n):
        gain = torch.where(used, -torch.inf, aim - q @ b)
        if float(gain.max()) <= 1e-12:
            break
        used[gain.argmax()] = True
        b, used = _settled(q, aim, b, used)
    return b * aim / (b * aim).sum()


def _units(m: Tensor) -> Tensor:
    """1 / sqrt of the diagonal; an entry of (nearly) 0 counts as a small share of the least other one."""
    size = m.diagonal().abs()
    if not bool((size > 0).any()):
        size = m.abs().sum(1)
    if not bool((size > 0).any()):
        return torch.ones_like(size)
    return size.clamp(min=FLOOR * float(size[size > 0].min())).rsqrt()


def _lifted(m: Tensor) -> Tensor | None:
    """M with no eigenvalue below the floor; None where no eigenvalue is above 0. Most matrices need no
    change, which is cheap to see."""
    if not bool(m.any()):
        return None
    eye = torch.eye(len(m), dtype=m.dtype)
    if int(torch.linalg.cholesky_ex(m - FLOOR * m.diagonal().abs().sum() * eye).info) == 0:
        return m
    values, vectors = torch.linalg.eigh(m)
    largest = float(values.max())
    return None if largest <= 0 else (vectors * values.clamp(min=FLOOR * largest)) @ vectors.T


def _begun(q: Tensor, aim: Tensor) -> tuple[Tensor, Tensor]:
    """A good set of entries to begin with: all entries that would be negative leave it at once. At least one
    always stays."""
    used = torch.ones_like(aim, dtype=torch.bool)
    while True:
        best = _best(q, aim, used)
        if bool((best[used] > 0).all()):
            return best, used
        used = best > 0


def _best(q: Tensor, aim: Tensor, used: Tensor) -> Tensor:
    out = torch.zeros_like(aim)
    out[used] = torch.linalg.solve(q[used][:, used], aim[used])
    return out


def _settled(q: Tensor, aim: Tensor, b: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The best b on a set of entries; those that would become negative on the way there leave the set."""
    while True:
        best = _best(q, aim, used)
        bad = used & (best <= 0)
        if not bool(bad.any()):
            return best, used
        way = torch.where(bad, b / (b - best), torch.inf)
        b = b + way.min() * (best - b)
        used = used & (way > way.min()) & (b > 0)
        b = torch.where(used, b, 0.0)
