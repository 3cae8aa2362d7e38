"""Pairs of clients, each with many samples of the class of which the other has few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.registry import register, setting
from holdfast.data.partitions.base import Assignment, Partition, by_class


@dataclass(frozen=True)
class _Pair:
    """The samples of the two clients of a pair: `held[i][j]` are positions of the pair's class j at its
    client i."""

    classes: tuple[int, int]  # indices among the classes that occur
    held: list[list[np.ndarray]]
    test: np.ndarray


@register("partition", "complementary-pairs", paper="FedCOM")
class ComplementaryPairs(Partition):
    """Clients 2i and 2i + 1 share two classes: the first has most of one and little of the other, its partner
    the complement.

    The classes that occur are paired in order; where there are more pairs of clients than of classes, those
    on the same two classes divide their samples. With noise = "class", each client also has as many samples
    of a third class, which is drawn, as of its minority class. Other clients may hold these samples too: this
    is the only case in which a sample is held twice.

    Each client is tested on its own two classes in equal amounts, on samples that no client trains on;
    clients on the same two classes share them. So data.split gives no test part here, only a validation part
    of the training samples. Facts: `partner`, `majority`, `target` (its minority class) and `noise` (a class,
    or -1).

    Counts: with t = floor(test * samples of the rarer class), at least 1, a client is tested on 2 t samples,
    and all others of its two classes are assigned. Of n samples of a class that a pair holds, round((1 -
    ratio) * n), at least 1, are its minority. With samples_per_client, each client trains on exactly that
    many, noise included: m = round(n * (1 - ratio)), at least 1, of its minority class and of its noise
    class, where n is such that n + m is samples_per_client.
    """

    ratio: float = setting(
        0.95,
        "share of a class that goes to its majority client (FedCOM: .95, on CIFAR-10 .8)",
        ge=0.5,
        lt=1,
    )
    noise: Literal["class", "none"] = setting(
        "class", "class: a third class, with as many samples as the minority class; none: two classes only"
    )
    test: float = setting(0.25, "share of a class set aside for testing", gt=0, lt=1)

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> Assignment:
        if clients % 2:
            raise DataError(f"data.partition: {clients} clients cannot be paired; make data.clients even")
        groups = by_class(labels, rng)
        needed = 2 + (self.noise == "class")
        if len(groups) < needed:
            raise DataError(
                f"data.partition: pairs with noise {self.noise} need {needed} classes but the data has"
                f" {len(groups)}"
            )
        names = np.array([labels[group[0]] for group in groups])
        pairs, trained = self._pairs(names, groups, clients // 2)
        # by client: the index of its majority class
        rich = np.array([pair.classes for pair in pairs]).reshape(-1)
        poor = np.array([pair.classes[::-1] for pair in pairs]).reshape(-1)
        lists = [held for pair in pairs for held in pair.held]
        drawn = [
            self._noise(names, trained, (rich[c], poor[c]), len(lists[c][1 - c % 2]), rng)
            for c in range(clients)
        ]
        return Assignment(
            [np.sort(np.concatenate([*mine, extra])) for mine, (_, extra) in zip(lists, drawn, strict=True)],
            tests=[pair.test for pair in pairs for _ in pair.held],
            overlap=self.noise == "class",
            facts={
                "partner": np.arange(clients) ^ 1,
                "majority": names[rich],
                "target": names[poor],
                "noise": np.array([noise for noise, _ in drawn]),
            },
        )

    def _pairs(
        self, names: np.ndarray, groups: list[np.ndarray], count: int
    ) -> tuple[list[_Pair], list[np.ndarray]]:
        """Return the pairs in client order, and the training samples of every class."""
        trained, pairs = list(groups), {}
        kinds = len(groups) // 2
        for kind in range(min(kinds, count)):
            places = (2 * kind, 2 * kind + 1)
            amount = max(1, int(self.test * min(len(groups[place]) for place in places) + 1e-9))
            test = np.sort(np.concatenate([groups[place][:amount] for place in places]))
            for place in places:
                trained[place] = groups[place][amount:]
            users = range(kind, count, kinds)
            pieces = [np.array_split(trained[place], len(users)) for place in places]
            for turn, pair in enumerate(users):
                one, two = (
                    self._divided(names[place], piece[turn])
                    for place, piece in zip(places, pieces, strict=True)
                )
                pairs[pair] = _Pair(places, [[one[0], two[1]], [one[1], two[0]]], test)
        return [pairs[pair] for pair in range(count)], trained

    def _divided(self, name: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Divide the samples of a class between the pair's client that has it as majority and the other
        one."""
        most, least = self._amounts(len(rows))
        if least < 1 or most < least or most + least > len(rows):
            wanted = most + least if self.samples_per_client else 2
            remedy = (
                "samples_per_client, test or data.clients"
                if self.samples_per_client
                else "test or data.clients"
            )
            raise DataError(
                f"data.partition: class {name} has {len(rows)} samples to train a pair on but needs {wanted};"
                f" lower {remedy}"
            )
        return rows[:most], rows[most : most + least]

    def _amounts(self, held: int) -> tuple[int, int]:
        """Return the number of samples of a client's majority and minority class."""
        poor = 1 - self.ratio
        if self.samples_per_client is None:
            least = max(1, min(held // 2, int(poor * held + 0.5)))
            return held - least, least
        times = 2 if self.noise == "class" else 1  # how often the minority's amount is counted
        least = int(self.samples_per_client * poor / (1 + poor * (times - 1)) + 0.5)
        least = max(1, min(self.samples_per_client // (times + 1), least))
        if self.samples_per_client - times * least < least:
            raise DataError(
                f"data.partition: samples_per_client {self.samples_per_client} with ratio {self.ratio:g}"
                f" and noise {self.noise} leaves no majority class; raise samples_per_client or ratio"
            )
        return self.samples_per_client - times * least, least

    def _noise(
        self,
        names: np.ndarray,
        trained: list[np.ndarray],
        own: tuple[int, int],
        amount: int,
        rng: np.random.Generator,
    ) -> tuple[int, np.ndarray]:
        """Draw a third class and some of its samples; never one that a client is tested on."""
        if self.noise == "none":
            return -1, np.zeros(0, dtype=np.int64)
        enough = [place for place, rows in enumerate(trained) if place not in own and len(rows) >= amount]
        if not enough:
            raise DataError(
                f'data.partition: no third class has {amount} samples for noise; set noise = "none" or raise'
                " ratio"
            )
        place = int(rng.choice(enough))
        return int(names[place]), rng.choice(trained[place], size=amount, replace=False)
