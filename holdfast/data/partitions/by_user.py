"""One client for each user who recorded the data."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.registry import register
from holdfast.data.partitions.base import Assignment, Partition, group_by_owner


@register("partition", "by-user")
class ByUser(Partition):
    """One client for each user, where the dataset records who each sample comes from.

    Without data.clients there are as many clients as users. With fewer clients than users, the users are
    drawn. Clients are in the order of their users; the fact `user` says which.

    Counts: all samples of these users are assigned. Sizes are the users' own, so samples_per_client is an
    upper bound: larger clients keep a random choice of that many.
    """

    per_user: ClassVar[bool] = True

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> Assignment:
        if users is None:
            raise DataError(
                "data.partition: this dataset has no users, which by-user needs; choose another partition"
            )
        known = np.unique(users)
        if clients > len(known):
            raise DataError(
                f"data.partition: {clients} clients but the data has {len(known)} users; lower"
                " data.clients or leave it out"
            )
        chosen = known if clients == len(known) else np.sort(rng.choice(known, size=clients, replace=False))
        held = np.flatnonzero(np.isin(users, chosen))
        lists = group_by_owner(
            held, np.searchsorted(chosen, users[held]), clients, rng, self.samples_per_client
        )
        return Assignment(lists, facts={"user": chosen})
