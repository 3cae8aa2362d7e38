"""Divide every client's samples into train, validation and test, each client by its own key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from holdfast.core.keys import Key, combine
from holdfast.data.client_rows import ClientRows


class Split(BaseModel):
    """Shares of a client's samples; they add up to 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    train: float = Field(default=0.75, gt=0, le=1, description="share of a client's samples for training")
    validation: float = Field(
        default=0.0, ge=0, le=1, description="share of a client's samples for validation"
    )
    test: float = Field(default=0.25, ge=0, le=1, description="share of a client's samples for testing")

    @model_validator(mode="after")
    def _whole(self) -> Split:
        total = self.train + self.validation + self.test
        if abs(total - 1) > 1e-9:
            raise ValueError(f"train + validation + test must be 1, but they add up to {total:g}")
        return self

    def sizes(self, count: np.ndarray) -> np.ndarray:
        """Return [3, K] samples for train, validation, test. When there are too few, train comes first, then
        test, then validation."""
        tested = int(self.test > 0)
        validation = np.zeros_like(count)
        if self.validation > 0:
            wanted = np.maximum(_floor(count * self.validation), 1)
            validation = np.clip(wanted, 0, np.maximum(count - 1 - tested, 0))
        if not tested:
            return np.stack([count - validation, validation, np.zeros_like(count)])
        most = np.maximum(count - validation - 1, np.minimum(count, 1))
        train = np.minimum(np.maximum(_floor(count * self.train), 1), most)
        return np.stack([train, validation, count - train - validation])


def split_clients(
    lists: Sequence[np.ndarray],
    y: np.ndarray,
    split: Split,
    key: Key,
    tests: Sequence[np.ndarray | None] | None = None,
) -> tuple[ClientRows, ClientRows, ClientRows]:
    """Return the train, validation and test rows. The destination of a row depends only on its client's id
    and on that client's rows. Where a client has a test set of its own, only the validation part is taken
    from its rows. A row that several clients hold is used for training first, so that no client trains on a
    row that another is validated on."""
    count = np.array([len(rows) for rows in lists], dtype=np.int64)
    rows = np.concatenate(lists).astype(np.int64)
    owner = np.repeat(np.arange(len(lists)), count)
    bits = key.fold(torch.arange(len(lists))).bits
    chance = combine(bits[torch.from_numpy(owner)], torch.from_numpy(rows)).numpy()
    _, place, holders = np.unique(rows, return_inverse=True, return_counts=True)
    order = np.lexsort((chance, holders[place] == 1, owner))
    rank = np.empty_like(rows)
    rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
    sizes = split.sizes(count)
    if tests is not None:
        untested = Split(train=1 - split.validation, validation=split.validation, test=0.0)
        sizes = np.where([own is not None for own in tests], untested.sizes(count), sizes)
    first, second = sizes[0][owner], (sizes[0] + sizes[1])[owner]
    train, validation, test = rank < first, (rank >= first) & (rank < second), rank >= second
    return (
        ClientRows.from_counts(rows[train], sizes[0], y),
        ClientRows.from_counts(rows[validation], sizes[1], y),
        _tested(rows[test], sizes[2], y, tests),
    )


def _tested(
    rows: np.ndarray, sizes: np.ndarray, y: np.ndarray, tests: Sequence[np.ndarray | None] | None
) -> ClientRows:
    """Return each client's own test set, or what was set aside of its rows."""
    if tests is None:
        return ClientRows.from_counts(rows, sizes, y)
    aside = np.split(rows, np.cumsum(sizes)[:-1])
    return ClientRows.from_lists([a if own is None else own for a, own in zip(aside, tests, strict=True)], y)


def _floor(x: np.ndarray) -> np.ndarray:
    return np.floor(x + 1e-9).astype(np.int64)  # 0.29 * 100 is 28.999...
