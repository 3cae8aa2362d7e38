"""How far rows spread and along which direction, from their products [n, n]. The covariance matrix itself,
[d, d], is out of reach at a million parameters; its eigenvalues are those of the centred products. Everything
here takes further axes before [n, n], such as one for the experiments of a sweep."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.aggregators.geometry import diagonal, distances, seen_from, times
from holdfast.aggregators.ordered import lowest

_HUGE = 1e140
"""Products beyond this count as this: their squares can still be computed."""


def from_the_middle(x: Tensor, ids: Tensor) -> Tensor:
    """All products of the rows, in float64, as they lie to one of them: that with the nearest majority. While
    fewer than half are malicious, it has an honest one at its side, so honest rows lose no digits to
    attackers far away. Costs two Gram products, one of them in float64."""
    near = distances(x).sort(dim=-1).values[..., x.shape[-2] // 2]
    middle = lowest(near, 1, ids)[..., None]
    seen = seen_from(x, x.take_along_dim(middle, dim=-2)[..., 0, :])
    return seen.nan_to_num_(nan=0.0).clamp_(-_HUGE, _HUGE)


def centred(seen: Tensor, weights: Tensor) -> Tensor:
    """The same products as the rows lie to their mean by these weights, which add up to 1."""
    each = times(seen, weights)
    both = (each * weights).sum(dim=-1)[..., None, None]
    return seen - each[..., :, None] - each[..., None, :] + both


def widest(seen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The largest eigenvalue of the covariance by these weights, and how far each row lies from the mean
    along its eigenvector, squared: ((x_i - mean) v)^2."""
    about, root = centred(seen, weights), weights.sqrt()
    found = torch.linalg.eigh(root[..., :, None] * about * root[..., None, :])
    size, leading = found.eigenvalues[..., -1:], found.eigenvectors[..., -1]
    along = times(about, root * leading).square() / size
    return size[..., 0], torch.where(size > 0, along, 0)


def farthest_along(about: Tensor, steps: int = 30) -> Tensor:
    """About how far each row lies out along the leading eigenvector of centred products, by the power method
    from the longest row on: enough to find the farthest."""
    longest = diagonal(about).argmax(dim=-1)
    found = about.take_along_dim(longest[..., None, None], dim=-1)[..., 0]
    for _ in range(steps):
        found = times(about, found / found.abs().amax(dim=-1, keepdim=True).clamp(min=1 / _HUGE))
    return found.abs()
