"""Clients with only a few classes."""

from __future__ import annotations

from typing import Literal

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.registry import register, setting
from holdfast.data.partitions.base import Partition, by_class, even, group_by_owner


@register(
    "partition",
    "pathological",
    paper="McMahan et al.: Communication-Efficient Learning of Deep Networks, AISTATS 2017",
)
class Pathological(Partition):
    """Each client holds only a few classes.

    blocks (PFLlib): classes in order, each given in equal shares to the first ceil(K/C * k) clients that
    still need one; neighbours have the same classes. shards (McMahan): samples sorted by label are cut into K
    * k shards, and every client gets k at random; a shard may span two classes, and two shards may be of one
    class.

    Counts: all samples of the classes that are used are assigned, in shares of a class (or shards) that
    differ by at most one; or samples_per_client each, spread evenly over a client's classes (or shards).
    """

    classes_per_client: int = setting(2, "number of classes (blocks) or shards of each client", ge=1)
    form: Literal["blocks", "shards"] = setting("blocks", "blocks (PFLlib) or shards (McMahan)")

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> list[np.ndarray]:
        self.check_size(len(labels), clients)
        groups = by_class(labels, rng)
        if self.samples_per_client and self.samples_per_client < self.classes_per_client:
            raise DataError(
                f"data.partition: {self.samples_per_client} samples_per_client cannot hold"
                f" {self.classes_per_client} classes_per_client; raise samples_per_client or lower"
                " classes_per_client"
            )
        return (
            self._blocks(labels, groups, clients, rng)
            if self.form == "blocks"
            else self._shards(groups, clients, rng)
        )

    def _blocks(
        self, labels: np.ndarray, groups: list[np.ndarray], clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        if self.classes_per_client > len(groups):
            raise DataError(
                f"data.partition: {clients} clients x {self.classes_per_client} classes_per_client but the"
                f" data has {len(groups)} classes; lower classes_per_client"
            )
        wants = _block_classes(clients, len(groups), self.classes_per_client)
        positions, owners = [], []
        for index, group in enumerate(groups):
            takers = np.flatnonzero(wants[:, index])
            sizes = even(len(group), len(takers)) if len(takers) else np.zeros(0, dtype=np.int64)
            if self.samples_per_client:
                # A client's samples are spread evenly over its classes; its first classes take the remainder.
                turn = wants[takers, :index].sum(1)
                sizes = self.samples_per_client // self.classes_per_client + (
                    turn < self.samples_per_client % self.classes_per_client
                )
            if len(takers) > len(group) or sizes.sum() > len(group):
                remedy = "samples_per_client or data.clients" if self.samples_per_client else "data.clients"
                raise DataError(
                    f"data.partition: class {labels[group[0]]} has {len(group)} samples but its {len(takers)}"
                    f" clients need {max(len(takers), sizes.sum())}; lower {remedy}"
                )
            positions.append(group[: sizes.sum()])
            owners.append(np.repeat(takers, sizes))
        return group_by_owner(np.concatenate(positions), np.concatenate(owners), clients, rng)

    def _shards(self, groups: list[np.ndarray], clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        ordered = np.concatenate(groups)
        shards = clients * self.classes_per_client
        if shards > len(ordered):
            raise DataError(
                f"data.partition: {clients} clients x {self.classes_per_client} shards but only"
                f" {len(ordered)} samples; lower classes_per_client or data.clients"
            )
        holder = rng.permutation(shards) // self.classes_per_client
        if not self.samples_per_client:
            return group_by_owner(ordered, np.repeat(holder, even(len(ordered), shards)), clients, rng)
        # A client's k shards add up to its size exactly; the samples left over are spread over the whole
        # sorted list.
        sizes = np.empty(shards, dtype=np.int64)
        sizes[np.argsort(holder, kind="stable")] = np.tile(
            even(self.samples_per_client, self.classes_per_client), clients
        )
        kept = np.sort(rng.choice(len(ordered), size=sizes.sum(), replace=False))
        return group_by_owner(ordered[kept], np.repeat(holder, sizes), clients, rng)


def _block_classes(clients: int, classes: int, each: int) -> np.ndarray:
    """[clients, classes]: which client holds which class. Clients that PFLlib's single pass leaves short take
    their missing classes from the first on."""
    wants = np.zeros((clients, classes), dtype=bool)
    left = np.full(clients, each)
    width = -(-clients * each // classes)
    for limit in (width, clients):
        for index in range(classes):
            takers = np.flatnonzero((left > 0) & ~wants[:, index])[:limit]
            wants[takers, index] = True
            left[takers] -= 1
    return wants
