"""Updates cut in two by their directions: the step of clustered federated learning, as a defence and as a way
to separate groups.

Sattler, Müller, Samek: Clustered Federated Learning: Model-Agnostic Distributed Multi-Task Optimization under
Privacy Constraints, IEEE TNNLS 2020."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.aggregators.geometry import cosines, norms, weighted
from holdfast.aggregators.ordered import arranged, by_id
from holdfast.core.device import to_device


def at_odds(x: Tensor, w: Tensor, mean_below: float | None, max_above: float | None) -> bool:
    """Whether clients pull in different directions: the mean update is short, but some updates are long."""
    return bool(pull_apart(x, w, mean_below, max_above))


def pull_apart(x: Tensor, w: Tensor, mean_below: float | None, max_above: float | None) -> Tensor:
    """The same as a tensor, one for each experiment of x [..., n, d]."""
    found = torch.ones(x.shape[:-2], dtype=torch.bool, device=x.device)
    if mean_below is not None:
        found &= ~(norms(weighted(w, x)[..., None, :])[..., 0] >= mean_below)
    if max_above is not None:
        found &= norms(x).amax(dim=-1) > max_above
    return found


def bipartition(x: Tensor, ids: Tensor, complete: bool = False) -> Tensor:
    """bool[n], one of the two parts: the cut makes the largest cosine across it as small as it can be, which
    is what single linkage does. Ties between cuts are broken by the ids, not by the order of replies."""
    order = by_id(ids, x)
    part = two_parts(arranged(1 - cosines(x), order), complete)
    return torch.empty_like(part).index_copy_(0, order, part)


def bipartitions(x: Tensor, ids: Tensor, complete: bool = False) -> Tensor:
    """bool[c, n]: the same for several experiments. What is near to what is a small table: the host cuts
    them, and waits for the device once."""
    order = by_id(ids, x)
    tables = arranged(1 - cosines(x), order).cpu()
    parts = torch.stack([two_parts(table, complete) for table in tables])
    return torch.empty_like(parts, device=x.device).scatter_(-1, order, to_device(parts, x.device))


def two_parts(apart: Tensor, complete: bool) -> Tensor:
    """bool[n], one of the two groups that are left when the two nearest groups are joined again and again.

    In rounds instead of n - 2 joins one after the other, and where the numbers are: a join changes nothing
    for groups that have another nearest one. Of equally near groups the one with the lowest id is joined."""
    far = apart.clone().fill_diagonal_(torch.inf)
    return _complete(far) if complete else _single(far)


def _single(far: Tensor) -> Tensor:
    """Each group joins its nearest group. Of all groups on the way, the one whose nearest is farthest off is
    a side of the best cut: nothing joins it before the last step. Of equal ones the last, so that the lowest
    ids stay together."""
    group, widest = torch.arange(len(far), device=far.device), far.new_tensor([-1.0])
    part = group < 0
    while len(far) > 1:
        nearest, partner = far.min(dim=1)
        lonely = len(far) - 1 - nearest.flip(0).argmax(dim=0, keepdim=True)
        part = torch.where(nearest[lonely] > widest, group == lonely, part)
        widest = torch.maximum(widest, nearest[lonely])
        here = torch.arange(len(far), device=far.device)
        head = torch.where(
            (partner[partner] == here) & (here < partner), here, partner
        )  # of a pair that chose each other, the first
        for _ in range(len(far).bit_length()):
            head = head[head]
        heads, place = head.unique(return_inverse=True)
        for _ in range(2):  # rows, then columns
            farthest = far.new_full((len(heads), far.shape[1]), torch.inf)
            far = farthest.scatter_reduce_(0, place[:, None].expand_as(far), far, "amin").T.contiguous()
        far.fill_diagonal_(torch.inf)
        group = place[group]
    return part


def _complete(far: Tensor) -> Tensor:
    """All pairs of groups that are each other's nearest are joined at once."""
    group = torch.arange(len(far), device=far.device)
    while len(far) > 2:
        here, partner = torch.arange(len(far), device=far.device), far.argmin(dim=1)
        first = here[(partner[partner] == here) & (here < partner)]
        second = partner[first]
        for _ in range(2):  # rows, then columns
            far[first] = torch.maximum(far[first], far[second])
            far = far.T
        head = here.index_copy(0, second, first)
        heads, place = head.unique(return_inverse=True)
        far, group = far[heads][:, heads], place[group]
    return group == group[0]
