"""Small experiments, and a way to start one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.experiment.config import Config, make_config
from holdfast.experiment.runner import RunCallbacks
from holdfast.sweeps import session

TINY: dict[str, Any] = {
    "method": "ditto",
    "model": {"name": "mlp", "hidden": 8},
    "data": {"clients": 4, "partition": {"name": "pathological", "samples_per_client": 20}},
    "train": {"rounds": 2, "local_epochs": 1, "batch_size": 5},
    "engine": {"plan": "loop", "threads": 1},
}


def config(**sections: Any) -> Config:
    merged = {
        name: {**TINY.get(name, {}), **value} if isinstance(value, dict) else value
        for name, value in sections.items()
    }
    return make_config({**TINY, **merged})


def begin(out: Path, watch: RunCallbacks | None = None, **sections: Any) -> list[dict[str, Any]]:
    return session.start([("", config(**sections))], out, watch)
