"""Which samples a client sees at which step: the argsort of a hash of (key, epoch, position), independent of
the cohort and the order of calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.core.keys import Key


@dataclass(frozen=True)
class Schedule:
    """Batches of positions in each client's table: `index[t, i]` are the samples of row i at step t, -1 where
    there is none.

    `steps[i]` is the number of steps of row i and `size[t, i]` the number of real samples, both known to the
    host."""

    index: Tensor
    steps: np.ndarray
    size: np.ndarray


def schedule(
    key: Key,
    count: np.ndarray,
    batch_size: int,
    epochs: np.ndarray | None = None,
    steps: np.ndarray | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
) -> Schedule:
    """Plan all batches of a local training. Give epochs or steps, one number per row; steps run through as
    many epochs as they need."""
    n, longest = len(count), int(count.max(initial=0))
    per_epoch = count // batch_size if drop_last else -(-count // batch_size)
    if steps is not None:
        total = np.where(per_epoch > 0, steps, 0)
    else:
        assert epochs is not None
        total = per_epoch * epochs
    last = int(total.max(initial=0))
    index = torch.full((last, n, batch_size), -1, dtype=torch.int64)
    size = np.zeros((last, n), dtype=np.int64)
    safe = np.maximum(per_epoch, 1)
    rounds = int((-(-total // safe)).max(initial=0))
    width = int(per_epoch.max(initial=0)) * batch_size
    valid = torch.arange(longest) < torch.from_numpy(count)[:, None]
    for epoch in range(rounds):
        order = _order(key.fold("batches", epoch), valid, shuffle)
        batches = _fit_width(order, width).view(n, -1, batch_size)
        row, batch = np.nonzero(np.arange(batches.shape[1]) < per_epoch[:, None])
        step = epoch * per_epoch[row] + batch
        kept = step < total[row]
        row, batch, step = row[kept], batch[kept], step[kept]
        index[torch.from_numpy(step), torch.from_numpy(row)] = batches[
            torch.from_numpy(row), torch.from_numpy(batch)
        ]
        size[step, row] = np.minimum(count[row] - batch * batch_size, batch_size)
    return Schedule(index, total, size)


def _order(key: Key, valid: Tensor, shuffle: bool) -> Tensor:
    """[n, longest]: each row's own positions in shuffled order, then -1."""
    n, longest = valid.shape
    position = torch.arange(longest).expand(n, longest)
    if shuffle:
        last = torch.iinfo(torch.int64).max
        drawn = torch.where(valid, key.to("cpu").hash(longest), last)
        # stable: padding stands behind the real positions and stays there, even behind one whose hash is the
        # largest number
        position = torch.argsort(drawn, dim=1, stable=True)
    count = valid.sum(1, keepdim=True)
    return torch.where(torch.arange(longest) < count, position, -1)


def _fit_width(order: Tensor, width: int) -> Tensor:
    n, longest = order.shape
    if longest >= width:
        return order[:, :width]
    return torch.cat([order, torch.full((n, width - longest), -1, dtype=torch.int64)], dim=1)
