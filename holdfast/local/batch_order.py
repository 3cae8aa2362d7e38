"""Which samples a client sees at which step: the argsort of a hash of (key, epoch, position), independent of
the cohort and the order of calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.core.device import to_device
from holdfast.core.keys import Key


@dataclass(frozen=True)
class Schedule:
    """Batches of positions in each client's table: `index[t, i]` are the samples of row i at step t, -1 where
    there is none; it is on the device that trains.

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
    device: torch.device | None = None,
) -> Schedule:
    """Plan all batches of a local training. Give epochs or steps, one number per row; steps run through as
    many epochs as they need. Only integers are computed, so the order is the same on every device."""
    device = device or torch.device("cpu")
    per_epoch = count // batch_size if drop_last else -(-count // batch_size)
    if steps is not None:
        total = np.where(per_epoch > 0, steps, 0)
    else:
        assert epochs is not None
        total = per_epoch * epochs
    last = int(total.max(initial=0))
    t, safe = np.arange(last)[:, None], np.maximum(per_epoch, 1)
    kept, batch = t < total, t % safe
    size = np.where(kept, np.minimum(count - batch * batch_size, batch_size), 0)
    rounds = int((-(-total // safe)).max(initial=0))
    orders = _orders(key, count, int(per_epoch.max(initial=0)) * batch_size, rounds, shuffle, device)
    # the place of each batch's first position among all orders; of a step that is not taken, of any other
    first = ((t // safe).clip(max=max(rounds - 1, 0)) * len(count) + np.arange(len(count))) * orders.shape[-1]
    places = to_device(torch.from_numpy(first + batch * batch_size), device)[..., None]
    found = orders.flatten()[places + torch.arange(batch_size, device=device)]
    taken = to_device(torch.from_numpy(kept), device)[..., None]
    return Schedule(found.where(taken, -1), total, size)


def _orders(
    key: Key, count: np.ndarray, width: int, rounds: int, shuffle: bool, device: torch.device
) -> Tensor:
    """[rounds, n, width]: for each epoch each row's own positions in shuffled order, then -1. Narrower than
    the longest row where its last, smaller batch is dropped."""
    n, longest = len(count), int(count.max(initial=0))
    out = torch.full((rounds, n, width), -1, dtype=torch.int64, device=device)
    inside, position = min(width, longest), torch.arange(longest, device=device).expand(n, longest)
    valid = position < to_device(torch.from_numpy(count), device)[:, None]
    keys = Key(to_device(key.bits, device))
    for epoch in range(rounds):
        order = position
        if shuffle:
            drawn = keys.fold("batches", epoch).hash(longest).where(valid, torch.iinfo(torch.int64).max)
            # stable: padding stands behind the real positions and stays there, even behind one whose hash is
            # the largest number
            order = drawn.argsort(dim=1, stable=True)
        out[epoch, :, :inside] = order.where(valid, -1)[:, :inside]
    return out
