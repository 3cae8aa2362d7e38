"""Datasets, clients, rounds and networks of a map, and its cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.defence_map.axes import Attacked, Defence, Settings, Table

ROOT = 100
"""Samples that the server holds, for the parts that need them; all others leave them alone."""


@dataclass(frozen=True)
class Scale:
    """How large a map is."""

    data: Mapping[str, Table]
    """By the name of a dataset: sections of the config that are its own."""
    train: Table
    seeds: int
    device: str = "cpu"
    plan: str = "vmap"
    parts: Settings = field(default_factory=dict)
    """Settings of parts, by kind and name: those that would take most of the time with their defaults."""


_LIGHT: Settings = {
    "aggregator": {"deepsight": {"samples": 256, "seeds": 1}},  # its inputs: 20,000, three times
    "detector": {"deepsight": {"samples": 256, "seeds": 1}},
    "attack": {
        "bad-pfl": {"steps": 4, "width": 4},  # its generator: 30 batches in a round, 16 channels
        "iba": {"trigger_epochs": 1},
    },
}
_SKEWED = {"name": "dirichlet", "beta": 0.5}
SCALES: Mapping[str, Scale] = {
    "try": Scale(
        data={
            "digits": {
                "data": {"clients": 8, "partition": {**_SKEWED, "samples_per_client": 40}},
                "model": {"name": "mlp", "hidden": 8},
            }
        },
        train={"rounds": 2, "local_epochs": 1, "batch_size": 16, "lr": 0.1},
        seeds=1,
        parts=_LIGHT,
    ),
    "small": Scale(
        data={
            "fashion-mnist": {
                "data": {"clients": 20, "partition": {**_SKEWED, "samples_per_client": 80}},
                "model": {"name": "mlp", "hidden": 16},
            },
            "uci-har": {
                "data": {"clients": 20, "partition": {"name": "by-user", "samples_per_client": 80}},
                "model": {"name": "mlp", "hidden": 16},
                "train": {"lr": 0.2},
            },
        },
        train={"rounds": 15, "local_epochs": 1, "batch_size": 20, "lr": 0.1},
        seeds=3,
        parts=_LIGHT,
    ),
    "full": Scale(
        data={
            "fashion-mnist": {
                "data": {"clients": 50, "partition": {**_SKEWED, "samples_per_client": 300}},
                "model": "lenet",
            },
            "uci-har": {"data": {"partition": "by-user"}, "model": {"name": "mlp", "hidden": 64}},
            "cifar10": {
                "data": {"clients": 50, "partition": {**_SKEWED, "samples_per_client": 300}},
                "model": "fedcap-cnn",
            },
        },
        train={"rounds": 60, "local_epochs": 2, "batch_size": 20, "lr": 0.05},
        seeds=3,
        device="cuda",
        plan="auto",
    ),
}


@dataclass(frozen=True)
class Cell:
    """One experiment of the map."""

    defence: str
    attack: str
    seed: int
    table: Table

    @property
    def label(self) -> str:
        return f"{self.defence} {self.attack} seed={self.seed}"

    @property
    def digest(self) -> str:
        """Names all settings: a cell that was measured with others is measured again."""
        return digest_of(self.table)


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def cells(
    scale: Scale, data: str, attack: Attacked, defences: Sequence[Defence], device: str | None = None
) -> list[Cell]:
    """All defences and seeds under one attack on one dataset."""
    return [
        Cell(defence.name, attack.name, seed, _table(scale, data, attack, defence, seed, device))
        for seed in range(scale.seeds)
        for defence in defences
    ]


def _table(
    scale: Scale, data: str, attack: Attacked, defence: Defence, seed: int, device: str | None
) -> dict[str, Any]:
    own = scale.data[data]
    engine: dict[str, Any] = {"device": device or scale.device, "plan": scale.plan}
    if engine["device"] == "cpu":  # the cores are for cells beside each other
        engine |= {"threads": 1, "workers": 1}
    config = {
        "seed": seed,
        "data": {"name": data, "root": ROOT, **own["data"]},
        "model": own["model"],
        "method": "fedavg",
        "train": {**scale.train, **own.get("train", {})},
        "evaluate": {"every": scale.train["rounds"]},
        "engine": engine,
    }
    return attack.laid_over(defence.laid_over(config))
