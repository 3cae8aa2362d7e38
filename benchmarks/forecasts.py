"""Compares the forecasts of `holdfast plan` with real runs: seconds, peak memory, bytes on disk, as predicted
/ actual.

    python benchmarks/forecasts.py cpu
    python benchmarks/forecasts.py cuda --only cnn32-ragged --json

Every plan and every run is a process of its own, so that peaks are its own. On a CPU plan and threads are
set: where a busy machine makes `auto` choose otherwise the second time, the comparison says nothing about the
prediction."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ONE = {"threads": 1, "workers": 1}
RAGGED = {"name": "dirichlet", "beta": 0.5, "min_samples": 20}
CNN32 = {"name": "synthetic", "options": {"shape": [3, 32, 32], "samples": 10_000}, "clients": 20}

CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "mlp-sweep": {
            "data": {"clients": 20},
            "train": {"rounds": 60, "local_epochs": 2},
            "engine": {"plan": "vmap", **ONE},
            "sweep": {"method.name": ["fedavg", "fedprox", "ditto"], "seed": [0, 1]},
        },
        "mlp-drawn": {
            "method": "ditto",
            "data": {"clients": 60, "partition": {"name": "dirichlet", "beta": 0.5}},
            "train": {"rounds": 150, "participation": 0.2},
            "evaluate": {"every": 5},
            "engine": {"plan": "vmap", **ONE},
        },
        "cnn-ditto": {
            "method": "ditto",
            "model": "cnn-bn",
            "data": {"clients": 10},
            "train": {"rounds": 20, "local_epochs": 2},
            "engine": {"plan": "vmap", **ONE},
        },
        "cnn32-loop": {
            "model": "fedcap-cnn",
            "data": {**CNN32, "partition": {"name": "iid", "samples_per_client": 100}},
            "train": {"rounds": 10, "local_epochs": 5},
            "evaluate": {"every": 5},
            "engine": {"plan": "loop", **ONE},
        },
        "mlp-workers": {
            "method": "ditto",
            "data": {"clients": 40},
            "train": {"rounds": 40},
            "engine": {"plan": "vmap", "workers": 2},
        },
    },
    "cuda": {
        "mlp-sweep": {
            "data": {"clients": 20},
            "train": {"rounds": 100},
            "sweep": {"method.name": ["fedavg", "ditto"], "seed": [0, 1, 2]},
        },
        "cnn32-ragged": {
            "model": "fedcap-cnn",
            "data": {**CNN32, "partition": RAGGED},
            "train": {"rounds": 25},
            "evaluate": {"every": 5},
        },
        "cnn32-ditto": {
            "method": "ditto",
            "model": "fedcap-cnn",
            "data": {**CNN32, "partition": {"name": "iid", "samples_per_client": 300}},
            "train": {"rounds": 20},
            "sweep": {"seed": [0, 1]},
        },
    },
}


def main() -> None:
    options = argparse.ArgumentParser(description="`holdfast plan` against what then happens")
    options.add_argument("device", choices=["cpu", "cuda"])
    options.add_argument("--only", choices=sorted({name for configs in CONFIGS.values() for name in configs}))
    options.add_argument("--json", action="store_true")
    options.add_argument("--do", choices=["plan", "run"], help="one of the processes")
    given = options.parse_args()
    if given.do:
        config = CONFIGS[given.device][given.only]
        print(
            json.dumps(
                _planned(config, given.device) if given.do == "plan" else _played(config, given.device)
            )
        )
        return
    lines = [_compare(given.device, name) for name in CONFIGS[given.device] if given.only in (None, name)]
    if given.json:
        print(json.dumps(lines, indent=1))


def _compare(device: str, name: str) -> dict[str, Any]:
    found = {}
    for what in ("plan", "run"):
        command = [sys.executable, __file__, device, "--only", name, "--do", what]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[what] = json.loads(done.stdout.splitlines()[-1])
    planned, actual = found["plan"], found["run"]
    ratios = {
        key: round(planned[key] / actual[key], 3)
        for key in ("seconds", "memory", "gpu", "disk")
        if actual[key]
    }
    text = ", ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items())
    print(
        f"{name:14} predicted / actual: {text}  ({actual['seconds']:.1f} s, planned in {planned['took']:.1f}"
        f" s as {' '.join(planned['plans'])}, ran as {' '.join(actual['plans'])})",
        file=sys.stderr,
        flush=True,
    )
    return {"config": name, "ratios": ratios, "planned": planned, "actual": actual}


def _planned(config: dict[str, Any], device: str) -> dict[str, Any]:
    import holdfast

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        found = holdfast.plan(_on(config, device), out=Path(folder) / "run")
        took = time.perf_counter() - began
    plans = sorted({group.plan for group in found.groups})
    return {
        "seconds": found.seconds.total,
        "memory": found.memory.host,
        "gpu": found.memory.device or 0,
        "disk": found.disk.total,
        "took": took,
        "plans": plans,
        "parts": found.plain()["seconds"],
    }


def _played(config: dict[str, Any], device: str) -> dict[str, Any]:
    import torch

    import holdfast.api  # noqa: F401  (its imports are part of the peak, as they are of the plan's)
    from holdfast.core.peak_memory import peak
    from holdfast.engine.simulator import Simulator
    from holdfast.experiment.config import make_config
    from holdfast.sweeps.grid import expand
    from holdfast.sweeps.session import start

    workers = 0

    class Measured(Simulator):
        def close(self) -> None:
            nonlocal workers
            if self._dispatch is not None and self._dispatch.pool is not None:
                workers = sum(peak(pid) for pid in self._dispatch.pool.pids)
            super().close()

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        cells = [(label, make_config(table)) for label, table in expand(_on(config, device))]
        results = start(cells, Path(folder) / "run", engine=Measured)
        seconds = time.perf_counter() - began
        disk = sum(file.stat().st_size for file in (Path(folder) / "run").rglob("*") if file.is_file())
        manifests = [
            json.loads((Path(result["run_dir"]) / "manifest.json").read_text()) for result in results
        ]
    gpu = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    plans = sorted({manifest["plan"]["name"] for manifest in manifests})
    return {"seconds": seconds, "memory": peak() + workers, "gpu": gpu, "disk": disk, "plans": plans}


def _on(config: dict[str, Any], device: str) -> dict[str, Any]:
    return {**config, "engine": {**config.get("engine", {}), "device": device}}


if __name__ == "__main__":
    main()
