"""Any partitioner of the package flwr-datasets, where it is installed."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from holdfast.core.errors import DataError, suggest
from holdfast.core.registry import register, setting
from holdfast.data.partitions.base import Partition, group_by_owner


@register("partition", "flwr", paper="Beutel et al.: Flower: A Friendly Federated Learning Framework, 2020")
class Flower(Partition):
    """A partitioner of Flower Datasets assigns the samples: it sees shuffled rows of `index`, `label` and
    `user` (where the dataset has users).

    Its num_partitions is data.clients, its partition_by the label and its seed drawn from the run's, unless
    options say otherwise. Needs the package flwr-datasets.

    Counts: those of the partitioner, which may leave clients without samples; samples_per_client is an upper
    bound: larger clients keep a random choice of that many.
    """

    partitioner: str = setting(
        "IidPartitioner", "a class of flwr_datasets.partitioner, such as DirichletPartitioner"
    )
    options: dict[str, Any] = setting({}, "its arguments, such as { alpha = 0.5 }")

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, users: np.ndarray | None = None
    ) -> list[np.ndarray]:
        chosen, seed = self._find(), int(rng.integers(2**31))
        # as Flower's FederatedDataset does; some partitioners assign rows in their order
        order = rng.permutation(len(labels))
        columns = {"index": order, "label": labels[order]} | ({} if users is None else {"user": users[order]})
        table = _packages()[1].from_dict({name: column.tolist() for name, column in columns.items()})
        try:
            partitioner = chosen(**self._arguments(chosen, clients, seed))
            partitioner.dataset = table
            if partitioner.num_partitions == clients:
                lists = [
                    np.asarray(partitioner.load_partition(client)["index"], dtype=np.int64)
                    for client in range(clients)
                ]
        except Exception as error:  # a partitioner can raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(
                f"data.partition: {self.partitioner} failed: {reason}; change options or data.clients"
            ) from error
        if partitioner.num_partitions != clients:
            raise DataError(
                f"data.partition: {self.partitioner} makes {partitioner.num_partitions} clients, but"
                f" data.clients is {clients}; set data.clients to {partitioner.num_partitions}"
            )
        owner = np.repeat(np.arange(clients), [len(rows) for rows in lists])
        return group_by_owner(np.concatenate(lists), owner, clients, rng, self.samples_per_client)

    def _find(self) -> Any:
        module = _packages()[0]
        known = [name for name in dir(module) if name.endswith("Partitioner") and name != "Partitioner"]
        if self.partitioner not in known:
            raise DataError(
                "data.partition.partitioner: flwr-datasets has no"
                f" '{self.partitioner}'{suggest(self.partitioner, known)}"
            )
        return getattr(module, self.partitioner)

    def _arguments(self, chosen: Any, clients: int, seed: int) -> dict[str, Any]:
        """Return the options, and those of our values that this partitioner takes."""
        offered = {"num_partitions": clients, "partition_by": "label", "seed": seed}
        taken = inspect.signature(chosen).parameters
        return {name: value for name, value in offered.items() if name in taken} | self.options


def _packages() -> tuple[Any, Any]:
    """Return flwr_datasets.partitioner and datasets.Dataset."""
    try:
        import flwr_datasets.partitioner
        from datasets import Dataset
    except ImportError:
        raise DataError(
            "data.partition: 'flwr' needs the package flwr-datasets; install it, or choose another partition"
        ) from None
    return flwr_datasets.partitioner, Dataset
