"""Record which rows, under which labels, belong to which client: lists of different lengths, end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Padded:
    """The lists of some clients side by side. Beyond a client's count are row 0 and label 0, which are
    padding: use the mask."""

    rows: Tensor  # [n, m]
    labels: Tensor  # [n, m]
    count: Tensor  # [n]

    @property
    def mask(self) -> Tensor:
        """[n, m]: True where there is a sample."""
        return (
            torch.arange(self.rows.shape[1], device=self.rows.device)
            < self.count.to(self.rows.device)[:, None]
        )

    def drawn(self, luck: Tensor, first: Tensor, count: Tensor) -> Padded:
        """Return a part of each client's samples: `count` of them from index `first` on, when they are sorted
        by `luck` [n, m]."""
        luck = torch.where(self.mask, luck.to(self.rows.device), torch.iinfo(torch.int64).max)
        place = first[:, None] + torch.arange(max(1, int(count.max()) if len(count) else 0))
        order = luck.argsort(dim=1, stable=True).gather(
            1, place.clamp(max=self.rows.shape[1] - 1).to(luck.device)
        )
        return Padded(self.rows.gather(1, order), self.labels.gather(1, order), count)


def either(first: Padded, second: Padded) -> Padded:
    """Return the first table's samples of each client, or the second's where the first has none."""
    width = max(first.rows.shape[1], second.rows.shape[1])
    wide = [
        [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in (p.rows, p.labels)]
        for p in (first, second)
    ]
    has = first.count > 0
    mask = has.to(first.rows.device)[:, None]
    rows, labels = (torch.where(mask, a, b) for a, b in zip(*wide, strict=True))
    return Padded(rows, labels, torch.where(has, first.count, second.count))


@dataclass(frozen=True, eq=False)
class ClientRows:
    """One list of (row, label) pairs per client; client i has the entries [start[i], start[i + 1]). A list
    may be empty."""

    row: Tensor  # [total] int64
    label: Tensor  # [total] int64
    start: Tensor  # [K + 1] int64

    @staticmethod
    def from_lists(lists: Sequence[np.ndarray], y: Tensor | np.ndarray) -> ClientRows:
        """Build from each client's rows, labelled as in the dataset (y holds a label for every row)."""
        rows = (
            np.concatenate([np.asarray(rows, dtype=np.int64).reshape(-1) for rows in lists])
            if lists
            else np.zeros(0, np.int64)
        )
        return ClientRows.from_counts(rows, np.array([len(rows) for rows in lists], dtype=np.int64), y)

    @staticmethod
    def from_counts(rows: np.ndarray, counts: np.ndarray, y: Tensor | np.ndarray) -> ClientRows:
        """Build from all rows in client order and the number of rows of each client."""
        row = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
        start = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
        return ClientRows(row, torch.as_tensor(y).cpu()[row].to(torch.int64), start)

    @property
    def clients(self) -> int:
        return self.start.shape[0] - 1

    @property
    def counts(self) -> Tensor:
        return self.start[1:] - self.start[:-1]

    def by_class(self, classes: int) -> Tensor:
        """[K, classes]: how many samples of each label a client has."""
        owner = torch.repeat_interleave(torch.arange(self.clients, device=self.label.device), self.counts)
        return torch.bincount(owner * classes + self.label, minlength=self.clients * classes).view(
            self.clients, classes
        )

    def client(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the rows and labels of one client."""
        if not 0 <= index < self.clients:
            raise IndexError(f"client {index} does not exist: there are {self.clients} clients")
        begin, end = int(self.start[index]), int(self.start[index + 1])
        return self.row[begin:end], self.label[begin:end]

    def take(self, ids: Tensor, at_least: int = 1) -> Padded:
        """Return the lists of these clients, padded to the longest of them, or to a given width if that is
        larger."""
        ids = ids.to(self.start.device)
        # -1 would wrap around silently
        if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < self.clients):
            raise IndexError(
                f"client ids {int(ids.min())}..{int(ids.max())} do not exist: there are {self.clients}"
                " clients"
            )
        count = self.counts[ids]
        width = max(at_least, int(count.max()) if ids.numel() else 0)
        place = torch.arange(width, device=ids.device)
        inside = place < count[:, None]
        if not self.row.numel():
            empty = torch.zeros_like(inside, dtype=torch.int64)
            return Padded(empty, empty.clone(), count)
        at = torch.where(inside, self.start[ids][:, None] + place, 0)
        return Padded(torch.where(inside, self.row[at], 0), torch.where(inside, self.label[at], 0), count)

    def to(self, device: torch.device | str) -> ClientRows:
        return ClientRows(self.row.to(device), self.label.to(device), self.start.to(device))
