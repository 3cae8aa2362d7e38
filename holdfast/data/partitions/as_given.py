"""Data that was given client by client."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.registry import register
from holdfast.data.partitions.base import Assignment, Partition, group_by_owner


@register("partition", "as-given")
class AsGiven(Partition):
    """Every client holds what was given for it in Python, as in holdfast.run(data=[(X0, y0), (X1, y1)]).

    A client that was given a test set is tested on that; of the others, data.split sets samples aside.

    Counts: each client has all its samples, so samples_per_client must be left out.
    """

    per_user: ClassVar[bool] = True
    own_tests: ClassVar[bool] = True

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> Assignment:
        if users is None:
            raise DataError(
                "data.partition: as-given is for data that is handed over client by client; choose"
                " another partition"
            )
        if self.samples_per_client is not None:
            raise DataError(
                "data.partition: as-given gives every client all its samples; leave samples_per_client out"
            )
        if int(users.max()) >= clients:
            raise DataError(
                f"data.clients: {clients} clients, but data was given for {int(users.max()) + 1}; leave"
                f" data.clients out"
            )
        return Assignment(group_by_owner(np.arange(len(users)), users, clients, rng))
