"""How samples are dealt to clients. A partition sees labels (and users) and returns positions; it never sees the samples.

To add one: subclass Partition, register it under a name, return one array of positions per client, no position twice.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.registry import Part, register, setting


class Partition(Part):
    """What every partition can be set to."""

    samples_per_client: int | None = setting(None, "how many samples a client gets; none: all samples are dealt", ge=1)

    def __call__(self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None) -> list[np.ndarray]:
        """Positions into labels, one array per client."""
        raise TypeError(f"partition '{self.name}' does not say how to deal")

    def _check(self, total: int, clients: int) -> None:
        """Refuse what no way of dealing can give."""
        if clients > total:
            raise DataError(f"data.partition: {clients} clients but only {total} samples; lower data.clients")
        if self.samples_per_client and self.samples_per_client * clients > total:
            raise DataError(
                f"data.partition: {clients} clients x {self.samples_per_client} samples_per_client is more than the {total} samples"
                "; lower samples_per_client or data.clients"
            )


@register("partition", "iid")
class Iid(Partition):
    """Every client draws from all classes alike; sizes differ by one at most."""

    def __call__(self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None) -> list[np.ndarray]:
        self._check(len(labels), clients)
        sizes = np.full(clients, self.samples_per_client) if self.samples_per_client else _even(len(labels), clients)
        return _cut(rng.permutation(len(labels))[: sizes.sum()], sizes)


@register("partition", "dirichlet", paper="Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution, 2019")
class Dirichlet(Partition):
    """Each class is shared out by proportions drawn from Dirichlet(beta).

    A client that already holds N/K samples gets nothing of later classes (as PFLlib does). Drawn again until the smallest client has
    min_samples. Sizes differ, so samples_per_client is an upper bound here: larger clients keep a random choice of that many.
    """

    beta: float = setting(0.5, "smaller: more skew (FedAS: .1, .3, .5; FedCPA: .5)", gt=0, le=1e6)
    min_samples: int = setting(10, "smallest client (FedCPA: 10, PFLlib: 40)", ge=0)
    tries: int = setting(200, "draws before giving up", ge=1)

    def _check(self, total: int, clients: int) -> None:
        if clients * self.min_samples > total:
            raise DataError(
                f"data.partition: {clients} clients x {self.min_samples} min_samples is more than the {total} samples there are; "
                "lower min_samples or data.clients"
            )
        if self.samples_per_client and self.samples_per_client < self.min_samples:
            raise DataError(
                f"data.partition: samples_per_client {self.samples_per_client} is below min_samples {self.min_samples}; "
                "raise samples_per_client or lower min_samples"
            )

    def __call__(self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None) -> list[np.ndarray]:
        self._check(len(labels), clients)
        groups = _by_class(labels, rng)
        shares = self._draw([len(group) for group in groups], clients, rng)
        owner = np.concatenate([np.repeat(np.arange(clients), share) for share in shares])
        return _deal(np.concatenate(groups), owner, clients, rng, self.samples_per_client)

    def _draw(self, class_sizes: list[int], clients: int, rng: np.random.Generator) -> np.ndarray:
        """[classes, clients] numbers of samples. Only sizes are drawn again, so that a try is cheap."""
        best = 0
        for _ in range(self.tries):
            shares = _dirichlet_shares(class_sizes, clients, self.beta, rng)
            smallest = int(shares.sum(0).min())
            if smallest >= self.min_samples:
                return shares
            best = max(best, smallest)
        raise DataError(
            f"data.partition: {self.tries} draws with beta {self.beta:g} left one of {clients} clients below {self.min_samples} "
            f"min_samples (best: {best}); raise beta, lower min_samples or lower data.clients"
        )


@register("partition", "pathological", paper="McMahan et al.: Communication-Efficient Learning of Deep Networks, AISTATS 2017")
class Pathological(Partition):
    """Each client sees only a few classes.

    blocks (PFLlib): classes in order, each given in equal shares to the first ceil(K/C * k) clients that still want one; neighbours
    have the same classes. shards (McMahan): samples sorted by label are cut into K * k shards, every client gets k at random; a shard
    may reach over two classes, and two shards may be of one class.
    """

    classes_per_client: int = setting(2, "classes (blocks) or shards of each client", ge=1)
    form: Literal["blocks", "shards"] = setting("blocks", "blocks (PFLlib) or shards (McMahan)")

    def __call__(self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None) -> list[np.ndarray]:
        self._check(len(labels), clients)
        groups = _by_class(labels, rng)
        if self.samples_per_client and self.samples_per_client < self.classes_per_client:
            raise DataError(
                f"data.partition: {self.samples_per_client} samples_per_client cannot hold {self.classes_per_client} classes_per_client; "
                "raise samples_per_client or lower classes_per_client"
            )
        return self._blocks(labels, groups, clients, rng) if self.form == "blocks" else self._shards(groups, clients, rng)

    def _blocks(self, labels: np.ndarray, groups: list[np.ndarray], clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        if self.classes_per_client > len(groups):
            raise DataError(
                f"data.partition: {clients} clients x {self.classes_per_client} classes_per_client but the data has {len(groups)} classes; "
                "lower classes_per_client"
            )
        wants = _block_classes(clients, len(groups), self.classes_per_client)
        positions, owners = [], []
        for index, group in enumerate(groups):
            takers = np.flatnonzero(wants[:, index])
            sizes = _even(len(group), len(takers)) if len(takers) else np.zeros(0, dtype=np.int64)
            if self.samples_per_client:
                # A client's samples are spread evenly over its classes, its first classes taking the remainder.
                turn = wants[takers, :index].sum(1)
                sizes = self.samples_per_client // self.classes_per_client + (turn < self.samples_per_client % self.classes_per_client)
            if len(takers) > len(group) or sizes.sum() > len(group):
                remedy = "samples_per_client or data.clients" if self.samples_per_client else "data.clients"
                raise DataError(
                    f"data.partition: class {labels[group[0]]} has {len(group)} samples but its {len(takers)} clients need "
                    f"{max(len(takers), sizes.sum())}; lower {remedy}"
                )
            positions.append(group[: sizes.sum()])
            owners.append(np.repeat(takers, sizes))
        return _deal(np.concatenate(positions), np.concatenate(owners), clients, rng)

    def _shards(self, groups: list[np.ndarray], clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        ordered = np.concatenate(groups)
        shards = clients * self.classes_per_client
        if shards > len(ordered):
            raise DataError(
                f"data.partition: {clients} clients x {self.classes_per_client} shards but only {len(ordered)} samples; "
                "lower classes_per_client or data.clients"
            )
        holder = rng.permutation(shards) // self.classes_per_client
        if not self.samples_per_client:
            return _deal(ordered, np.repeat(holder, _even(len(ordered), shards)), clients, rng)
        # A client's k shards add up to its size exactly; the samples left over are spread over the whole sorted line.
        sizes = np.empty(shards, dtype=np.int64)
        sizes[np.argsort(holder, kind="stable")] = np.tile(_even(self.samples_per_client, self.classes_per_client), clients)
        kept = np.sort(rng.choice(len(ordered), size=sizes.sum(), replace=False))
        return _deal(ordered[kept], np.repeat(holder, sizes), clients, rng)


def _even(total: int, parts: int) -> np.ndarray:
    """Sizes that add up to total and differ by one at most."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def _by_class(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Positions of each class that occurs, in label order, shuffled inside a class."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def _cut(positions: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    return [np.sort(piece) for piece in np.split(positions, np.cumsum(sizes)[:-1])]


def _deal(positions: np.ndarray, owner: np.ndarray, clients: int, rng: np.random.Generator, cap: int | None = None) -> list[np.ndarray]:
    """Positions grouped by owner; with a cap, a random choice of that many of each."""
    sizes = np.bincount(owner, minlength=clients)
    if cap is not None:
        mixed = rng.permutation(len(positions))
        order = mixed[np.argsort(owner[mixed], kind="stable")]
        rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        order, sizes = order[rank < cap], np.minimum(sizes, cap)
    else:
        order = np.argsort(owner, kind="stable")
    return _cut(positions[order], sizes)


def _dirichlet_shares(class_sizes: list[int], clients: int, beta: float, rng: np.random.Generator) -> np.ndarray:
    """One draw: [classes, clients] numbers of samples."""
    fair = sum(class_sizes) / clients
    held = np.zeros(clients, dtype=np.int64)
    shares = np.zeros((len(class_sizes), clients), dtype=np.int64)
    for index, size in enumerate(class_sizes):
        share = rng.dirichlet(np.full(clients, beta)) * (held < fair)
        if not share.sum() > 0:  # a tiny beta can put all weight on clients that are full: one of the others takes the class
            share[rng.choice(np.flatnonzero(held < fair))] = 1.0
        reach = np.cumsum(share)
        edges = (reach / reach[-1] * size).astype(np.int64)  # the last edge is size exactly, whatever the rounding
        shares[index] = np.diff(edges, prepend=0)
        held += shares[index]
    return shares


def _block_classes(clients: int, classes: int, each: int) -> np.ndarray:
    """[clients, classes]: who holds what. Clients that PFLlib's single pass leaves short take their missing classes from the first on."""
    wants = np.zeros((clients, classes), dtype=bool)
    left = np.full(clients, each)
    width = -(-clients * each // classes)
    for limit in (width, clients):
        for index in range(classes):
            takers = np.flatnonzero((left > 0) & ~wants[:, index])[:limit]
            wants[takers, index] = True
            left[takers] -= 1
    return wants
