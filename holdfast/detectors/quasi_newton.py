"""Products with the Hessian that L-BFGS estimates from the last models of a run (Byrd, Nocedal, Schnabel:
Representations of quasi-Newton matrices and their use in limited memory methods, Mathematical Programming 63,
1994, Theorem 2.3, for B)."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.aggregators.geometry import seen_from


def changes_of_update(steps: Tensor) -> Tensor:
    """[k, k] in float64: row j has the coefficients c of B v = c @ steps, where v = steps[j] + ... + steps[k
    - 1] is how far the model moved and B v by how much the update is expected to change.

    `steps` [k, d] are the moves of the model from round to round, the latest last. A pair of L-BFGS is a move
    s = steps[i] and by how much the update changed after it, y = steps[i + 1] - steps[i], since the update of
    a round is the next move; so there are k - 1 pairs. Pairs of a model that stood still are left out;
    without any pair, or where the matrix tells nothing, no change is expected."""
    k, out = len(steps), torch.zeros(len(steps), len(steps), dtype=torch.float64)
    products = seen_from(steps, torch.zeros_like(steps[0])).cpu()  # of all steps with one another
    moved = (products.diagonal()[:-1] > 0).nonzero().flatten()
    if not len(moved):
        return out
    s, y = torch.eye(k, dtype=torch.float64)[moved], torch.zeros(len(moved), k, dtype=torch.float64)
    y[torch.arange(len(moved)), moved + 1], y[torch.arange(len(moved)), moved] = 1.0, -1.0
    ss, sy = s @ products @ s.T, s @ products @ y.T
    sigma = sy[-1, -1] / ss[-1, -1]
    below = sy.tril(-1)
    middle = torch.cat(
        [torch.cat([sigma * ss, below], 1), torch.cat([below.T, -torch.diag(sy.diagonal())], 1)]
    )
    if not bool(middle.isfinite().all()):
        return out
    inverse = torch.linalg.pinv(middle)
    for j in range(k):
        v = torch.zeros(k, dtype=torch.float64)
        v[j:] = 1.0
        weights = inverse @ torch.cat([sigma * (s @ products @ v), y @ products @ v])
        out[j] = sigma * v - sigma * weights[: len(s)] @ s - weights[len(s) :] @ y
    return out
