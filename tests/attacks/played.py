"""Claims of papers about attacks, played at small scale: handwritten digits, unequally divided among 20
clients of which 4 attack, and a small network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.results.run import Run

SimulateAll = Callable[..., list[Run]]


def kept(simulate_all: SimulateAll, cases: list[tuple[Any, Any]], **train: Any) -> list[float]:
    """The accuracy of benign clients under each rule and attack (a name or a table; none)."""
    common = {
        "data": {"name": "digits", "clients": 20, "partition": {"name": "dirichlet", "beta": 0.5}},
        "model": {"name": "mlp", "hidden": 16},
        "train": {"rounds": 40, "lr": 0.05, "batch_size": 20, "dtype": "float32", **train},
    }
    tables = []
    for rule, attack in cases:
        table = {"name": attack} if isinstance(attack, str) else attack
        tables.append({**common, "aggregator": rule, "attack": table and {"fraction": 0.2, **table}})
    return [run.final["accuracy"] for run in simulate_all(tables)]
