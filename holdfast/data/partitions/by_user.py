"""Clients as they really are: one for each who recorded the data."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.registry import register
from holdfast.data.partitions.base import Assignment, Partition, deal


@register("partition", "by-user")
class ByUser(Partition):
    """One client for each user of a dataset that says who recorded what.

    Without data.clients there are as many clients as users. Fewer clients than users: the users are drawn;
    clients stand in the order of their users, who are the fact `user`.

    Counts: all samples of these users are dealt. Sizes are the users' own, so samples_per_client is an upper
    bound here: larger clients keep a random choice of that many.

    """

    per_user: ClassVar[bool] = True

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> Assignment:
        if users is None:
            raise DataError(
                "data.partition: this dataset does not say which user recorded what; choose another partition"
                " than by-user"
            )
        known = np.unique(users)
        if clients > len(known):
            raise DataError(
                f"data.partition: {clients} clients but the data has {len(known)} users; lower data.clients"
                " or leave it out"
            )
        chosen = known if clients == len(known) else np.sort(rng.choice(known, size=clients, replace=False))
        held = np.flatnonzero(np.isin(users, chosen))
        lists = deal(held, np.searchsorted(chosen, users[held]), clients, rng, self.samples_per_client)
        return Assignment(lists, facts={"user": chosen})
