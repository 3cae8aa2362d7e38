"""Small experiments in which tests play what papers claim of their defences: fedavg on the embedded digits,
20 clients with skewed labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from holdfast.attacks.backdoor import Backdoor
from holdfast.attacks.base import View
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink
from tests.helpers import run_all

SKEWED: dict[str, Any] = {"name": "dirichlet", "beta": 0.5, "samples_per_client": 60}
EVEN: dict[str, Any] = {"name": "iid", "samples_per_client": 60}
PATCH: dict[str, Any] = {"name": "backdoor", "size": 2, "fraction": 0.3}
BOOSTED: dict[str, Any] = {"name": "test-boosted-backdoor", "size": 2, "clients": (3,), "factor": 20.0}


@register("attack", "test-boosted-backdoor")
class BoostedBackdoor(Backdoor):
    """Model replacement: a backdoored update times a factor."""

    kinds: ClassVar[frozenset[str]] = frozenset({"update"})
    factor: float = setting(10.0, "factor on the update", gt=0)

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        return {name: self.factor * view.own(name) for name in self.targets(schema)}


def played(
    out: Path, rules: Sequence[Any], attack: Mapping[str, Any] | None, partition: Mapping[str, Any] = SKEWED
) -> list[dict[str, Any]]:
    """The final metrics of each rule after 15 rounds under this attack."""
    tables = [
        {
            "data": {"clients": 20, "root": 100, "partition": partition},
            "model": {"name": "mlp", "hidden": 32},
            "aggregator": rule,
            "attack": attack,
            "train": {
                "rounds": 15,
                "local_epochs": 2,
                "batch_size": 10,
                "lr": 0.1,
                "dtype": "float32",
            },
            "evaluate": {"every": 15},
        }
        for rule in rules
    ]
    return [run.final for run in run_all(tables, out)]
