"""A study of four experiments that runs in a second."""

from __future__ import annotations

import copy
from typing import Any

import pytest

SMALL: dict[str, Any] = {
    "key": "fedcap/table-9",
    "paper": "FedCAP",
    "title": "Two methods <under> attack",
    "notes": ["A note & more."],
    "config": {
        "data": {"name": "digits", "clients": 6, "partition": {"name": "pathological"}},
        "model": {"name": "mlp", "hidden": [8]},
        "train": {"rounds": 2, "local_epochs": 1},
        "engine": {"plan": "vmap", "threads": 1, "workers": 1},
    },
    "axes": {
        "attack": {"none": {"attack.name": "none"}, "IPM": {"attack.name": "ipm"}},
        "method": {"Mean": {"method.name": "fedavg"}, "Ditto": {"method.name": "ditto", "method.lam": 0.5}},
    },
    "metrics": {"TAcc(%)": {"figure": "accuracy", "times": 100}},
    "layout": {"rows": ["attack"], "columns": ["method"]},
    "claims": [{"says": "Ditto is better", "check": "best", "axis": "method", "label": "Ditto"}],
    "scale": {"quick": {"set": {"train.rounds": 1}}, "smoke": {"keep": {"attack": ["IPM"]}}},
}


@pytest.fixture
def small() -> dict[str, Any]:
    return copy.deepcopy(SMALL)
