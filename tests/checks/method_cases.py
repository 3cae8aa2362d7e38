"""Experiments for tests that run a method in difficult conditions."""

from __future__ import annotations

from typing import Any

NETWORKS: dict[str, dict[str, Any]] = {
    "cnn-bn": {"name": "cnn-bn", "channels": [3], "hidden": 5, "dropout": 0.3},
    "mlp": {"name": "mlp", "hidden": 6, "batch_norm": True, "dropout": 0.2},
}


def hard(name: str, **changes: Any) -> dict[str, Any]:
    """Ragged clients, BatchNorm, Dropout, partial participation: whatever can go wrong in a stack."""
    table: dict[str, Any] = {
        "method": {"name": name},
        "model": NETWORKS["mlp"],
        "train": {"rounds": 3, "local_epochs": 2, "participation": 0.6, "momentum": 0.5, "lr_decay": 0.9},
    }
    for section, value in changes.items():
        table[section] = (
            {**table.get(section, {}), **value} if isinstance(value, dict) and section != "model" else value
        )
    return table
