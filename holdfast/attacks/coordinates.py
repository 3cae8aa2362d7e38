"""Choosing coordinates of models by a score."""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDING = 16
"""Scores closer than this, in units in the last place of the largest one, are equal."""


def largest(score: Tensor, among: Tensor, share: float) -> Tensor:
    """bool[n, d]: in each row of `score` the largest ones, so many as this share of the chosen columns
    (`among`, bool[d]), rounded down; with them all that equal the least of them up to rounding, so that the
    choice does not hang on it. Scores outside `among` are never chosen."""
    count = int(share * int(among.sum()))
    if not count:
        return torch.zeros_like(score, dtype=torch.bool)
    inside = among.to(score.device).expand_as(score)
    finite = torch.where(inside, score, -torch.inf)
    least = finite.topk(count, dim=1).values[:, -1:]
    size = torch.where(inside, score.abs(), 0.0).amax(1, keepdim=True)
    return inside & (score >= least - _ROUNDING * torch.finfo(score.dtype).eps * size)
